"""The persistent batch: rows, replacement, parking, rejected input."""

import pytest

from contract.errors import InternalError
from contract.sampling import SamplingParams
from engine.compute.batch import InputBatch
from engine.outputs import NewRequestData, SchedulerOutput
from engine.sampling.logits_processors import SamplingRow
from tests.engine_compute.driver import add_cached
from tests.engine_compute.test_inputs import new_request


def update(batch: InputBatch, scheduled: SchedulerOutput, *names: str) -> None:
    scheduled.num_scheduled_tokens.update(dict.fromkeys(names, 1))
    batch.update(scheduled)


def test_the_row_of_a_finished_request_is_zeroed_and_reused() -> None:
    batch = InputBatch(1, 8, 2)
    update(batch, SchedulerOutput([new_request("a", [1, 2, 3, 4], [1, 2])]), "a")
    update(batch, SchedulerOutput([new_request("b", [9], [5])], finished_req_ids={"a", "never seen"}), "b")
    assert batch.row_of("b") == 0
    assert batch.token_table.tolist() == [[9, 0, 0, 0, 0, 0, 0, 0]]
    assert batch.block_table.tolist() == [[5, 0, 0, 0]]


def test_resumed_request_has_its_blocks_replaced() -> None:
    """B6: blocks are appended, except for a resumed request: its blocks are replaced and all its tokens sent again."""
    batch = InputBatch(2, 8, 2)
    update(batch, SchedulerOutput([new_request("a", [1, 2, 3], [1, 2])]), "a")
    resumed = SchedulerOutput()
    add_cached(resumed.scheduled_cached_reqs, "a", [7], 0, resumed_with=[1, 2, 3, 4])
    update(batch, resumed, "a")
    assert batch.block_table[0].tolist() == [7, 0, 0, 0]
    assert batch.token_table[0].tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
    assert (batch.requests["a"].num_tokens, batch.requests["a"].num_computed_tokens) == (4, 0)


def test_an_unscheduled_request_frees_its_row_and_returns() -> None:
    """With more requests than rows, a preempted or waiting request keeps its tokens and blocks outside the tables."""
    batch = InputBatch(1, 8, 2)
    update(batch, SchedulerOutput([new_request("a", [1, 2, 3], [1, 2])]), "a")
    batch.append_tokens([batch.requests["a"]], [[4]])
    update(batch, SchedulerOutput([new_request("b", [9], [5])]), "b")
    assert batch.token_table[0, :2].tolist() == [9, 0]
    again = SchedulerOutput(finished_req_ids={"b"})
    add_cached(again.scheduled_cached_reqs, "a", [3], 3)
    update(batch, again, "a")
    assert batch.token_table[0, :5].tolist() == [1, 2, 3, 4, 0]
    assert batch.block_table[0].tolist() == [1, 2, 3, 0]
    assert batch.requests["a"].num_tokens == 4


def test_a_request_that_is_added_twice_starts_over() -> None:
    batch = InputBatch(1, 8, 2)
    update(batch, SchedulerOutput([new_request("a", [1, 2, 3], [1, 2])]), "a")
    update(batch, SchedulerOutput([new_request("a", [5], [4])]), "a")
    assert batch.block_table[0].tolist() == [4, 0, 0, 0]
    assert batch.requests["a"].num_tokens == 1


def test_positions_are_absolute_and_only_answer_tokens_are_counted() -> None:
    """Law 6: the position of a sampled token is its index in prompt + answer."""
    batch = InputBatch(1, 16, 2)
    new = NewRequestData("a", [1, 2, 3, 4, 5], SamplingParams(seed=3), ([1, 2, 3],), 4, 4, eos_token_ids=(9,))
    update(batch, SchedulerOutput([new]), "a")
    assert batch.sampling_rows("a") == [SamplingRow(SamplingParams(seed=3), (9,), 5, 1)]
    batch.append_tokens([batch.requests["a"]], [[6]])
    assert batch.sampling_rows("a") == [SamplingRow(SamplingParams(seed=3), (9,), 6, 2)]


def test_no_token_is_written_beyond_max_model_len() -> None:
    batch = InputBatch(2, 4, 2)
    update(batch, SchedulerOutput([new_request("a", [1, 2, 3, 4], [1, 2])]), "a")
    batch.append_tokens([batch.requests["a"]], [[5]])
    assert batch.token_table.tolist() == [[1, 2, 3, 4], [0, 0, 0, 0]]


def test_inconsistent_scheduler_outputs_are_rejected() -> None:
    batch = InputBatch(1, 4, 2)
    unknown = SchedulerOutput()
    add_cached(unknown.scheduled_cached_reqs, "ghost", [], 3)
    with pytest.raises(InternalError, match="ghost"):
        update(batch, unknown, "ghost")
    with pytest.raises(InternalError, match="the model takes 4"):
        update(batch, SchedulerOutput([new_request("long", [1] * 5, [1])]), "long")
    two = SchedulerOutput([new_request("a", [1], [1]), new_request("b", [1], [1])])
    with pytest.raises(InternalError, match="more requests are scheduled than the 1 rows"):
        update(InputBatch(1, 4, 2), two, "a", "b")
    with pytest.raises(InternalError, match="3 blocks"):
        update(InputBatch(1, 4, 2), SchedulerOutput([new_request("a", [1], [1, 2, 3])]), "a")
