"""The worked example from the prompts alone: the scheduler decides its two steps, and the inputs are prepared from them."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from engine.compute.batch import InputBatch
from engine.compute.inputs import PreparedInputs, prepare_inputs
from engine.outputs import SchedulerOutput
from tests.engine_scheduling.stepping import SteppedEngine, fake_request

BUDGET, BLOCK_SIZE, MAX_MODEL_LEN = 10, 2, 12
PROMPTS = {"a": [10, 11, 12], "b": [20, 21], "c": [30, 31, 32, 33, 34, 35, 36, 37]}
KEYS = [f"{name}#0.0" for name in PROMPTS]


@dataclass(frozen=True)
class Step:
    """An order to the runner, the inputs that follow from it, and the tokens that were sampled."""

    scheduled: SchedulerOutput
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
    batch = InputBatch(4, MAX_MODEL_LEN, BLOCK_SIZE)
    return [compute(engine, batch), compute(engine, batch)]


def compute(engine: SteppedEngine, batch: InputBatch) -> Step:
    """Schedule a step, prepare its inputs, and apply its results to the scheduler and to the tables."""
    scheduled = engine.scheduler.schedule()
    batch.update(scheduled)
    inputs = prepare_inputs(batch, scheduled)
    output = engine.executor.execute_model(scheduled)
    sampled = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
    batch.append_tokens([batch.requests[key] for key in sampled], list(sampled.values()))
    engine.scheduler.update_from_output(scheduled, output)
    return Step(scheduled, inputs, sampled)


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


def test_the_prompts_alone_give_the_metadata_of_both_steps(steps: list[Step]) -> None:
    """C2: every part of the attention metadata, with the values of the example."""
    first, second = (partial(vector, step.inputs) for step in steps)
    assert first("input_ids") == [10, 11, 12, 20, 21, 30, 31, 32, 33, 34]
    assert first("positions") == [0, 1, 2, 0, 1, 0, 1, 2, 3, 4]
    assert first("slot_mapping") == [2, 3, 4, 6, 7, 8, 9, 10, 11, 12]
    assert first("query_start_loc") == [0, 3, 5, 10]
    assert (first("seq_lens"), first("num_computed_tokens")) == ([3, 2, 5], [0, 0, 0])
    assert first("block_table") == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    assert sizes(steps[0].inputs) == (3, 10, 5)
    sampled = [steps[0].sampled[key] for key in KEYS]
    assert [len(tokens) for tokens in sampled] == [1, 1, 0]
    assert second("input_ids") == [*sampled[0], *sampled[1], 35, 36, 37]
    assert second("positions") == [3, 2, 5, 6, 7]
    assert second("slot_mapping") == [5, 14, 13, 16, 17]
    assert second("query_start_loc") == [0, 1, 2, 5]
    assert (second("seq_lens"), second("num_computed_tokens")) == ([4, 3, 8], [3, 2, 5])
    assert second("block_table") == [[1, 2, 0, 0], [3, 7, 0, 0], [4, 5, 6, 8]]
    assert sizes(steps[1].inputs) == (3, 5, 3)


def vector(inputs: PreparedInputs, name: str) -> Any:
    return getattr(inputs, name).tolist()


def sizes(inputs: PreparedInputs) -> tuple[int, int, int]:
    return inputs.num_reqs, inputs.num_tokens, inputs.max_query_len
