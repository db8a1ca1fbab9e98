"""Input preparation: a worked example, vector by vector."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from contract.requests import PoolingParams
from contract.sampling import SamplingParams
from engine.compute.batch import InputBatch
from engine.compute.inputs import PreparedInputs, prepare_inputs
from engine.compute.staging import padded
from engine.outputs import NewRequestData, SchedulerOutput
from tests.engine_compute.driver import add_cached

MAX_NUM_REQS, MAX_MODEL_LEN, BLOCK_SIZE = 4, 12, 2
PROMPTS = {"0": [10, 11, 12], "1": [20, 21], "2": [30, 31, 32, 33, 34, 35, 36, 37]}
FIRST_BLOCKS = {"0": [1, 2], "1": [3], "2": [4, 5, 6]}


def new_request(req_id: str, tokens: list[int], blocks: list[int], num_computed: int = 0) -> NewRequestData:
    return NewRequestData(req_id, tokens, SamplingParams(), (blocks,), num_computed, len(tokens))


def first_step() -> tuple[InputBatch, PreparedInputs]:
    batch = InputBatch(MAX_NUM_REQS, MAX_MODEL_LEN, BLOCK_SIZE)
    scheduled = SchedulerOutput(
        scheduled_new_reqs=[new_request(name, PROMPTS[name], FIRST_BLOCKS[name]) for name in PROMPTS],
        num_scheduled_tokens={"0": 3, "1": 2, "2": 5},
        total_num_scheduled_tokens=10,
    )
    batch.update(scheduled)
    return batch, prepare_inputs(batch, scheduled)


def second_step() -> tuple[InputBatch, PreparedInputs]:
    batch, _ = first_step()
    batch.append_tokens([batch.requests["0"]], [[13]])
    batch.append_tokens([batch.requests["1"]], [[22]])
    scheduled = SchedulerOutput(num_scheduled_tokens={"0": 1, "1": 1, "2": 3}, total_num_scheduled_tokens=5)
    add_cached(scheduled.scheduled_cached_reqs, "0", [], 3)
    add_cached(scheduled.scheduled_cached_reqs, "1", [7], 2)
    add_cached(scheduled.scheduled_cached_reqs, "2", [8], 5)
    batch.update(scheduled)
    return batch, prepare_inputs(batch, scheduled)


def equal(vector: NDArray[Any], expected: list[Any]) -> bool:
    return bool(vector.tolist() == expected)


def test_a_step_has_inputs_and_attention_metadata() -> None:
    """C1, C2: token ids and positions, and every part of the attention metadata."""
    _, inputs = first_step()
    assert len(inputs.input_ids) == len(inputs.positions) == inputs.num_tokens == 10
    for name in ("query_start_loc", "seq_lens", "num_computed_tokens", "num_reqs", "num_tokens", "block_table",
                 "max_query_len", "slot_mapping"):  # fmt: skip
        assert getattr(inputs, name) is not None


def test_only_states_that_are_needed_are_requested() -> None:
    """Requests that sample or pool need the last state, means and scores all states, an unfinished prompt none."""
    assert first_step()[1].num_wanted.tolist() == [1, 1, 0]
    assert second_step()[1].num_wanted.tolist() == [1, 1, 1]
    batch, prompts = InputBatch(MAX_NUM_REQS, MAX_MODEL_LEN, BLOCK_SIZE), SchedulerOutput()
    for name, fields in {
        "scored": {"sampling_params": SamplingParams(prompt_logprobs=0)},
        "last": {"sampling_params": None, "pooling_params": PoolingParams("last")},
        "mean": {"sampling_params": None, "pooling_params": PoolingParams("mean")},
        "max": {"sampling_params": None, "pooling_params": PoolingParams("max")},
    }.items():
        prompts.scheduled_new_reqs.append(replace(new_request(name, [5, 6, 7, 8], [1, 2]), **fields))  # type: ignore[arg-type]
        prompts.num_scheduled_tokens[name] = 3
    batch.update(prompts)
    assert prepare_inputs(batch, prompts).num_wanted.tolist() == [3, 0, 3, 3]


def test_vector_lengths_match_token_request_and_system_level() -> None:
    """C3, C5: token, request and system level for budget 10, block 2, max_len 12, prompts 3, 2, 8."""
    batch, inputs = first_step()
    token_level = (inputs.request_indices, inputs.positions, inputs.token_indices, inputs.input_ids,
                   inputs.block_table_indices, inputs.block_numbers, inputs.block_offsets, inputs.slot_mapping)  # fmt: skip
    assert {len(vector) for vector in token_level} == {10}
    assert {len(v) for v in (inputs.seq_lens, inputs.num_computed_tokens, inputs.num_scheduled_tokens)} == {3}
    assert len(inputs.query_start_loc) == 4
    assert batch.token_table.shape == (MAX_NUM_REQS, MAX_MODEL_LEN)
    assert batch.block_table.shape == (MAX_NUM_REQS, MAX_MODEL_LEN // BLOCK_SIZE)


def test_state_update_fills_both_tables_before_preparation() -> None:
    """C4, C8, C9: whole prompts in the token table, block rows 1,2 / 3 / 4,5,6, unused cells 0 (the null block)."""
    batch, inputs = first_step()
    assert equal(batch.token_table[2], [30, 31, 32, 33, 34, 35, 36, 37, 0, 0, 0, 0])
    assert equal(inputs.input_ids, [10, 11, 12, 20, 21, 30, 31, 32, 33, 34])
    assert equal(
        batch.block_table, [[1, 2, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0], [4, 5, 6, 0, 0, 0], [0, 0, 0, 0, 0, 0]]
    )


def test_step_1_indices() -> None:
    """C6, C7: 3, 2 and 5 tokens are scheduled; the third prompt is chunked."""
    _, inputs = first_step()
    assert equal(inputs.num_scheduled_tokens, [3, 2, 5])
    assert equal(inputs.request_indices, [0, 0, 0, 1, 1, 2, 2, 2, 2, 2])
    assert equal(inputs.positions, [0, 1, 2, 0, 1, 0, 1, 2, 3, 4])
    assert equal(inputs.token_indices, [0, 1, 2, 12, 13, 24, 25, 26, 27, 28])


def test_step_1_slot_mapping() -> None:
    """C10: block-table indices, device blocks, offsets and slots."""
    _, inputs = first_step()
    assert equal(inputs.block_table_indices, [0, 0, 1, 6, 6, 12, 12, 13, 13, 14])
    assert equal(inputs.block_numbers, [1, 1, 2, 3, 3, 4, 4, 5, 5, 6])
    assert equal(inputs.block_offsets, [0, 1, 0, 0, 1, 0, 1, 0, 1, 0])
    assert equal(inputs.slot_mapping, [2, 3, 4, 6, 7, 8, 9, 10, 11, 12])


def test_step_1_request_level() -> None:
    """C11: at their start all requests fit into one 5 × 5 mask: that of the longest."""
    _, inputs = first_step()
    assert equal(inputs.query_start_loc, [0, 3, 5, 10])
    assert equal(inputs.seq_lens, [3, 2, 5])
    assert equal(inputs.num_computed_tokens, [0, 0, 0])
    assert (inputs.num_reqs, inputs.num_tokens, inputs.max_query_len) == (3, 10, 5)


def test_step_2_indices_and_sampled_tokens() -> None:
    """C12: sampled tokens are in the token table and are the inputs of the next step."""
    batch, inputs = second_step()
    assert equal(inputs.num_scheduled_tokens, [1, 1, 3])
    assert equal(inputs.request_indices, [0, 1, 2, 2, 2])
    assert equal(inputs.positions, [3, 2, 5, 6, 7])
    assert equal(inputs.token_indices, [3, 14, 29, 30, 31])
    assert equal(inputs.input_ids, [13, 22, 35, 36, 37])
    assert equal(batch.token_table[0][:5], [10, 11, 12, 13, 0])


def test_step_2_slot_mapping() -> None:
    """C13: blocks 7 and 8 are appended to the second and third row."""
    batch, inputs = second_step()
    assert equal(batch.block_table[:3], [[1, 2, 0, 0, 0, 0], [3, 7, 0, 0, 0, 0], [4, 5, 6, 8, 0, 0]])
    assert equal(inputs.block_table_indices, [1, 7, 14, 15, 15])
    assert equal(inputs.block_numbers, [2, 7, 6, 8, 8])
    assert equal(inputs.block_offsets, [1, 0, 1, 0, 1])
    assert equal(inputs.slot_mapping, [5, 14, 13, 16, 17])


def test_step_2_request_level() -> None:
    """C14, C15: decode rows and a chunk of a prompt are prepared in one batch by the same code: 5 queries, up to 8 keys."""
    _, inputs = second_step()
    assert equal(inputs.query_start_loc, [0, 1, 2, 5])
    assert equal(inputs.seq_lens, [4, 3, 8])
    assert equal(inputs.num_computed_tokens, [3, 2, 5])
    assert (inputs.num_reqs, inputs.num_tokens, inputs.max_query_len) == (3, 5, 3)
    assert (inputs.num_tokens, inputs.seq_lens.max()) == (5, 8)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(9 + 12, 2), (9 + 1, 1)])
def test_tokens_fill_blocks_of_sixteen(num_tokens: int, num_blocks: int) -> None:
    """A38: 21 tokens need 2 blocks, 10 tokens need 1."""
    batch = InputBatch(1, 64, 16)
    scheduled = SchedulerOutput(
        [new_request("a", list(range(num_tokens)), [5, 6, 7])], num_scheduled_tokens={"a": num_tokens}
    )
    batch.update(scheduled)
    assert len(set(prepare_inputs(batch, scheduled).block_numbers.tolist())) == num_blocks


@pytest.mark.parametrize(("num_tokens", "num_columns"), [(1, 1), (16, 1), (17, 2), (32, 2)])
def test_block_table_is_int32_and_zero_padded(num_tokens: int, num_columns: int) -> None:
    """A39: one row per sequence; shorter rows and unused rows are padded with 0. A step has the columns that it reads."""
    batch = InputBatch(4, 48, 16)
    rows = {"0": [13058, 13056], "1": [13057, 13055], "2": [13054]}
    scheduled = SchedulerOutput(
        [new_request(name, [1] * (16 * len(blocks)), blocks) for name, blocks in rows.items()],
        num_scheduled_tokens=dict.fromkeys(rows, num_tokens),
    )
    batch.update(scheduled)
    assert batch.block_table.dtype == batch.token_table.dtype == np.int32
    assert equal(batch.block_table, [[13058, 13056, 0], [13057, 13055, 0], [13054, 0, 0], [0, 0, 0]])
    whole = [[13058, 13056], [13057, 13055], [13054, 0]]
    assert equal(prepare_inputs(batch, scheduled).block_table, [row[:num_columns] for row in whole])


def test_block_table_covers_a_partly_filled_last_block() -> None:
    """C3: max_len 13 in blocks of 2 needs ceil(13 / 2) columns."""
    assert InputBatch(1, 13, 2).block_table.shape == (1, 7)


def test_rows_need_not_be_adjacent() -> None:
    """C7: request indices are rows of the tables, also if a row between them is free."""
    batch, _ = second_step()
    scheduled = SchedulerOutput(num_scheduled_tokens={"2": 1, "0": 1}, finished_req_ids={"1"})
    add_cached(scheduled.scheduled_cached_reqs, "2", [], 7)
    add_cached(scheduled.scheduled_cached_reqs, "0", [], 3)
    batch.update(scheduled)
    inputs = prepare_inputs(batch, scheduled)
    assert equal(inputs.request_indices, [2, 0])
    assert equal(inputs.input_ids, [37, 13])
    assert equal(inputs.slot_mapping, [17, 5])


@pytest.mark.parametrize("shape", [(3,), (2, 5), (0,)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_padding_adds_rows_behind(shape: tuple[int, ...], dtype: type[np.integer[Any]]) -> None:
    given = np.arange(math.prod(shape), dtype=dtype).reshape(shape)
    wide = padded(given, 4, -1)
    assert wide.dtype == np.int32
    assert wide.shape == (4, *shape[1:])
    assert np.array_equal(wide[: len(given)], given)
    assert (wide[len(given) :] == -1).all()
