"""The worked example from the prompts alone: the scheduler decides its two steps, and the inputs are prepared from them."""

from dataclasses import dataclass

import pytest

from engine.compute.batch import InputBatch
from engine.compute.inputs import PreparedInputs, prepare_inputs
from engine.outputs import SchedulerOutput
from tests.engine_scheduling.stepping import SteppedEngine, fake_request

BUDGET, BLOCK_SIZE, MAX_MODEL_LEN, NUM_ROWS = 10, 2, 12, 4
PROMPTS = {"a": [10, 11, 12], "b": [20, 21], "c": [30, 31, 32, 33, 34, 35, 36, 37]}
KEYS = [f"{name}#0.0" for name in PROMPTS]


@dataclass(frozen=True)
class Step:
    """An order to the runner, both tables and the inputs that follow from it, and the tokens that were sampled."""

    scheduled: SchedulerOutput
    token_table: list[list[int]]
    block_table: list[list[int]]
    inputs: PreparedInputs
    sampled: dict[str, list[int]]


@pytest.fixture
def steps() -> list[Step]:
    """The two steps of the example."""
    engine = SteppedEngine(
        with_connector=False,
        max_num_batched_tokens=BUDGET,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
    )
    engine.add(*(fake_request(name, prompt) for name, prompt in PROMPTS.items()))
    batch = InputBatch(NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE)
    return [compute(engine, batch), compute(engine, batch)]


def compute(engine: SteppedEngine, batch: InputBatch) -> Step:
    """Schedule a step, prepare its inputs, and apply its results to the scheduler and to the tables."""
    scheduled = engine.scheduler.schedule()
    batch.update(scheduled)
    tables = batch.token_table.tolist(), batch.block_table.tolist()
    inputs = prepare_inputs(batch, scheduled)
    output = engine.executor.execute_model(scheduled)
    sampled = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
    batch.append_tokens([batch.requests[key] for key in sampled], list(sampled.values()))
    engine.scheduler.update_from_output(scheduled, output)
    return Step(scheduled, *tables, inputs, sampled)


def test_the_budget_gives_three_two_and_five_tokens_then_one_one_and_three(steps: list[Step]) -> None:
    """C5, C6: budget 10, blocks of 2, 12 positions, prompts of 3, 2 and 8 tokens; the third one is chunked."""
    first, second = (step.scheduled for step in steps)
    assert first.num_scheduled_tokens == dict(zip(KEYS, (3, 2, 5), strict=True))
    assert [new.block_ids for new in first.scheduled_new_reqs] == [([1, 2],), ([3],), ([4, 5, 6],)]
    assert second.num_scheduled_tokens == dict(zip(KEYS, (1, 1, 3), strict=True))
    cached = second.scheduled_cached_reqs
    assert dict(zip(cached.req_ids, cached.new_block_ids, strict=True)) == dict(
        zip(KEYS, (([],), ([7],), ([8],)), strict=True)
    )
    assert dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True)) == dict(
        zip(KEYS, (3, 2, 5), strict=True)
    )


def test_the_prompts_alone_fill_both_tables(steps: list[Step]) -> None:
    """C8, C9, C12, C13: whole prompts and sampled tokens; rows of blocks, padded with the null block 0."""
    first, second = steps
    sampled = [first.sampled[key] for key in KEYS]
    assert [len(tokens) for tokens in sampled] == [1, 1, 0]
    prompts = list(PROMPTS.values())
    assert first.token_table == rows_of(prompts, MAX_MODEL_LEN)
    known = [prompt + tokens for prompt, tokens in zip(prompts, sampled, strict=True)]
    assert second.token_table == rows_of(known, MAX_MODEL_LEN)
    width = MAX_MODEL_LEN // BLOCK_SIZE
    assert first.block_table == rows_of([[1, 2], [3], [4, 5, 6]], width)
    assert second.block_table == rows_of([[1, 2], [3, 7], [4, 5, 6, 8]], width)


def test_the_prompts_alone_give_all_vectors_of_step_1(steps: list[Step]) -> None:
    """C2, C6, C7, C9, C10, C11: indices, blocks, slots and the attention metadata."""
    vectors = {
        "request_indices": [0, 0, 0, 1, 1, 2, 2, 2, 2, 2],
        "positions": [0, 1, 2, 0, 1, 0, 1, 2, 3, 4],
        "token_indices": [0, 1, 2, 12, 13, 24, 25, 26, 27, 28],
        "input_ids": [10, 11, 12, 20, 21, 30, 31, 32, 33, 34],
        "block_table_indices": [0, 0, 1, 6, 6, 12, 12, 13, 13, 14],
        "block_numbers": [1, 1, 2, 3, 3, 4, 4, 5, 5, 6],
        "block_offsets": [0, 1, 0, 0, 1, 0, 1, 0, 1, 0],
        "slot_mapping": [2, 3, 4, 6, 7, 8, 9, 10, 11, 12],
        "num_scheduled_tokens": [3, 2, 5],
        "query_start_loc": [0, 3, 5, 10],
        "seq_lens": [3, 2, 5],
        "num_computed_tokens": [0, 0, 0],
        "block_table": [[1, 2, 0], [3, 0, 0], [4, 5, 6]],
    }
    inputs = steps[0].inputs
    assert {name: getattr(inputs, name).tolist() for name in vectors} == vectors
    assert sizes(inputs) == {"num_reqs": 3, "num_tokens": 10, "max_query_len": 5, "max_seq_len": 5}


def test_the_prompts_alone_give_all_vectors_of_step_2(steps: list[Step]) -> None:
    """C2, C12, C13, C14, C15: two decodes and the rest of a prompt: 5 queries, each with up to 8 keys."""
    sampled = steps[0].sampled
    vectors = {
        "request_indices": [0, 1, 2, 2, 2],
        "positions": [3, 2, 5, 6, 7],
        "token_indices": [3, 14, 29, 30, 31],
        "input_ids": [*sampled[KEYS[0]], *sampled[KEYS[1]], 35, 36, 37],
        "block_table_indices": [1, 7, 14, 15, 15],
        "block_numbers": [2, 7, 6, 8, 8],
        "block_offsets": [1, 0, 1, 0, 1],
        "slot_mapping": [5, 14, 13, 16, 17],
        "num_scheduled_tokens": [1, 1, 3],
        "query_start_loc": [0, 1, 2, 5],
        "seq_lens": [4, 3, 8],
        "num_computed_tokens": [3, 2, 5],
        "block_table": [[1, 2, 0, 0], [3, 7, 0, 0], [4, 5, 6, 8]],
    }
    inputs = steps[1].inputs
    assert {name: getattr(inputs, name).tolist() for name in vectors} == vectors
    assert sizes(inputs) == {"num_reqs": 3, "num_tokens": 5, "max_query_len": 3, "max_seq_len": 8}


def rows_of(rows: list[list[int]], width: int) -> list[list[int]]:
    """Return a table of NUM_ROWS rows of this width, padded with zeros."""
    padding = [list[int]()] * (NUM_ROWS - len(rows))
    return [row + [0] * (width - len(row)) for row in rows + padding]


def sizes(inputs: PreparedInputs) -> dict[str, int]:
    return {
        "num_reqs": inputs.num_reqs,
        "num_tokens": inputs.num_tokens,
        "max_query_len": inputs.max_query_len,
        "max_seq_len": int(inputs.seq_lens.max()),
    }
