"""The outline of a step, prepared one step ahead: used if all requests continue by one token, and correct if used."""

import numpy as np
import pytest

from contract.requests import PoolingParams
from contract.sampling import SamplingParams
from engine.compute.batch import InputBatch
from engine.compute.inputs import PreparedInputs, outline_next, prepare_inputs
from engine.outputs import NewRequestData, SchedulerOutput
from engine.sampling.sampler import Samples
from engine.sampling.sampling_batch import Drawing
from tests.engine_compute.driver import add_cached
from tests.engine_compute.test_inputs import new_request

BLOCK_SIZE = 2


def first(num_rows: int = 4) -> tuple[InputBatch, PreparedInputs]:
    """Return a batch with prompts of 3 and 4 tokens, both computed, each with one sampled token."""
    batch = InputBatch(num_rows, 12, BLOCK_SIZE)
    prompts = {"a": [10, 11, 12], "b": [20, 21, 22, 23]}
    scheduled = SchedulerOutput(
        [new_request("a", prompts["a"], [1, 2]), new_request("b", prompts["b"], [3, 4])],
        num_scheduled_tokens={name: len(tokens) for name, tokens in prompts.items()},
    )
    batch.update(scheduled)
    inputs = prepare_inputs(batch, scheduled)
    for name in prompts:
        batch.append_tokens([batch.requests[name]], [[99]])
    return batch, inputs


def step(**num_tokens: int) -> SchedulerOutput:
    """Return a step of b (which needs a new block) and a, as far as named; further requests may be added."""
    scheduled = SchedulerOutput(
        num_scheduled_tokens=num_tokens, total_num_scheduled_tokens=sum(num_tokens.values())
    )
    blocks, computed = {"a": list[int](), "b": [5]}, {"a": 3, "b": 4}
    for name in num_tokens:
        add_cached(scheduled.scheduled_cached_reqs, name, blocks[name], computed[name])
    return scheduled


def resumed() -> SchedulerOutput:
    scheduled = step(b=1)
    cached = scheduled.scheduled_cached_reqs
    add_cached(cached, "a", [8, 9], 2, resumed_with=[10, 11, 12])
    scheduled.num_scheduled_tokens = {"a": 1, "b": 1}
    scheduled.total_num_scheduled_tokens = 2
    return scheduled


def replaced() -> SchedulerOutput:
    """Return a step with a new request of the same name and length."""
    scheduled = step(b=1)
    scheduled.scheduled_new_reqs.append(
        NewRequestData("a", [7] * 9, SamplingParams(), ([6, 7, 8, 9, 10],), 8, 9)
    )
    scheduled.num_scheduled_tokens = {"a": 1, "b": 1}
    scheduled.total_num_scheduled_tokens = 2
    return scheduled


def equal(one: PreparedInputs, other: PreparedInputs) -> bool:
    return all(np.array_equal(value, getattr(other, name)) for name, value in vars(one).items())


def test_it_is_used_if_all_requests_continue_by_one_token() -> None:
    batch, inputs = first()
    for length in range(2):
        ahead = outline_next(batch, inputs)
        scheduled = SchedulerOutput(num_scheduled_tokens={"a": 1, "b": 1}, total_num_scheduled_tokens=2)
        add_cached(scheduled.scheduled_cached_reqs, "a", [6] if length == 1 else [], 3 + length)
        add_cached(scheduled.scheduled_cached_reqs, "b", [5] if length == 0 else [], 4 + length)
        batch.update(scheduled)
        inputs = prepare_inputs(batch, scheduled, ahead)
        assert inputs.positions is ahead.positions
        assert equal(inputs, prepare_inputs(batch, scheduled))
        batch.append_tokens([batch.requests["a"]], [[50]])
        batch.append_tokens([batch.requests["b"]], [[51]])
    assert inputs.input_ids.tolist() == [50, 51]
    assert inputs.slot_mapping.tolist() == [6 * BLOCK_SIZE, 5 * BLOCK_SIZE + 1]


@pytest.mark.parametrize(
    "scheduled",
    [step(a=1), step(b=1, a=1), step(a=1, b=2), resumed(), replaced()],
    ids=["one alone", "another order", "two tokens", "one comes back", "another of that name"],
)
def test_it_is_not_used_in_any_other_case(scheduled: SchedulerOutput) -> None:
    batch, inputs = first()
    ahead = outline_next(batch, inputs)
    batch.update(scheduled)
    found = prepare_inputs(batch, scheduled, ahead)
    assert found.positions is not ahead.positions
    assert equal(found, prepare_inputs(batch, scheduled))


def test_it_is_not_used_after_requests_changed_rows() -> None:
    """One request gives way to a third and returns: the same names continue, but in other rows."""
    batch, inputs = first(num_rows=2)
    ahead = outline_next(batch, inputs)
    batch.update(SchedulerOutput([new_request("c", [1], [6])], num_scheduled_tokens={"c": 1, "b": 1}))
    scheduled = step(a=1, b=1)
    scheduled.finished_req_ids = {"c"}
    batch.update(scheduled)
    assert equal(prepare_inputs(batch, scheduled, ahead), prepare_inputs(batch, scheduled))


def test_each_request_gets_its_own_sampled_tokens() -> None:
    """Chunks and pooling prompts sample nothing; of three choices the first uses the request's own row; NaN gives none."""
    batch, scheduled = InputBatch(6, 12, BLOCK_SIZE), SchedulerOutput()
    for name, length, sampling in [
        ("chunk", 5, SamplingParams()),
        ("three", 2, SamplingParams(temperature=0.0)),
        ("pools", 2, None),
        ("bad", 2, SamplingParams(temperature=0.0)),
        ("one", 2, SamplingParams(temperature=0.0)),
    ]:
        pooling = None if sampling else PoolingParams("last")
        num_choices = 3 if name == "three" else 1
        scheduled.scheduled_new_reqs.append(
            NewRequestData(
                name, [1] * length, sampling, ([1, 2, 3],), 0, length, num_choices, pooling_params=pooling
            )
        )
        scheduled.num_scheduled_tokens[name] = 2
    batch.update(scheduled)
    drawing = Drawing.of_step(batch, scheduled, prepare_inputs(batch, scheduled))
    assert drawing.last.tolist() == [3, 7, 9]
    _, places = drawing.rows_and_places
    assert places is not None and places.tolist() == [0, 0, 0, 1, 2]
    assert not drawing.is_greedy
    output = drawing.spread(Samples([40, 41, 42, None, 44], [0, 0, 0, 6, 0], None))
    assert output.req_ids == ["chunk", "three", "pools", "bad", "one"]
    assert output.sampled_token_ids == [[], [40], [], [], [44]]
    assert {name: choices.token_ids for name, choices in output.other_choices.items()} == {"three": [41, 42]}
    assert output.num_nans_in_logits == {"bad": 6}


@pytest.mark.parametrize(
    ("fields", "is_greedy"),
    [
        ({}, True),
        ({"temperature": 0.5}, False),
        ({"logprobs": 0}, False),
        ({"logit_bias": {3: 1.0}}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"min_tokens": 2, "stop_token_ids": (5,)}, False),
        ({"min_tokens": 2}, True),
        ({"allowed_token_ids": (1, 2)}, False),
    ],
)
def test_which_requests_take_the_best_token(fields: dict[str, object], is_greedy: bool) -> None:
    batch, scheduled = InputBatch(1, 12, BLOCK_SIZE), SchedulerOutput(num_scheduled_tokens={"a": 1})
    sampling = SamplingParams(**{"temperature": 0.0, **fields})  # type: ignore[arg-type]
    scheduled.scheduled_new_reqs.append(NewRequestData("a", [1], sampling, ([1],), 0, 1))
    batch.update(scheduled)
    assert Drawing.of_step(batch, scheduled, prepare_inputs(batch, scheduled)).is_greedy is is_greedy


def test_a_request_with_a_grammar_does_not_take_the_best_token() -> None:
    """Law 6: the grammar's mask is applied before a token is sampled, however the other requests sample."""
    batch, scheduled = InputBatch(2, 12, BLOCK_SIZE), SchedulerOutput(num_scheduled_tokens={"a": 1, "b": 1})
    for name in ("a", "b"):
        new = NewRequestData(name, [1], SamplingParams(temperature=0.0), ([1],), 0, 1)
        scheduled.scheduled_new_reqs.append(new)
    scheduled.structured_output_request_ids = {"b": 0}
    scheduled.grammar_bitmask = np.full((1, 1), 7, dtype=np.int32)
    batch.update(scheduled)
    drawing = Drawing.of_step(batch, scheduled, prepare_inputs(batch, scheduled))
    assert not drawing.is_greedy
    (own, other), places = drawing.rows_and_places
    assert places is None
    assert own.bitmask is None
    assert other.bitmask is not None and other.bitmask.tolist() == [7]
