"""The counts of the requests that the router holds."""

from collections import Counter
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import OverloadedError
from contract.outputs import FinishReason
from router.answers.answer import Delta, Usage
from router.attempts.leg_outcome import LegReport
from router.attempts.request_tracker import RequestState, RequestTracker, TrackedRequest
from router.intake.limits import ClientCounts
from router.intake.request import BACKGROUND_PRIORITY, GenerationRequest
from router.telemetry.metrics import RouterMetrics
from router.tokens.delivery import Token


def test_an_answer_that_its_client_still_reads_neither_waits_nor_runs() -> None:
    tracker = RequestTracker(1, RouterMetrics().requests)
    usage = Usage(num_prompt_tokens=1, num_completion_tokens=0, num_cached_tokens=0)
    with tracker.open(GenerationRequest(request_id="a", prompt="x")) as tracked:
        assert (tracker.num_waiting, tracker.num_running) == (1, 0)
        tracked.on_bound()
        assert (tracker.num_waiting, tracker.num_running) == (1, 0)
        tracked.finish(Delta(), FinishReason.STOP, usage, LegReport())
        assert (tracker.num_waiting, tracker.num_running) == (0, 0)
        assert tracker.num_by_state()["finished"] == 1


def _request(tenant: str) -> GenerationRequest:
    return GenerationRequest(request_id="a", prompt="x", tenant=tenant)


def test_one_client_does_not_keep_another_out_of_the_queue() -> None:
    """M3: the queue is full of one client's requests; another one gets its share all the same, and the first no more."""
    tracker = RequestTracker(4, RouterMetrics().requests)
    with ExitStack() as held:
        for _ in range(4):
            held.enter_context(tracker.open(_request("hog")))
        with pytest.raises(OverloadedError, match="4 of this client"):
            held.enter_context(tracker.open(_request("hog")))
        for _ in range(2):
            held.enter_context(tracker.open(_request("other")))
        for tenant in ("other", "hog"):
            with pytest.raises(OverloadedError):
                held.enter_context(tracker.open(_request(tenant)))
    assert tracker.num_unbound == 0


@given(st.lists(st.sampled_from("abcd"), max_size=80), st.integers(1, 12))
def test_the_queue_is_bounded_and_no_client_is_kept_out(tenants: list[str], max_queue: int) -> None:
    """M3: at most twice ``max_queue`` wait; a client below its share is always admitted."""
    waiting: Counter[str] = Counter()
    counts = ClientCounts()
    for tenant in tenants:
        num_clients = len({name for name in waiting if waiting[name]} | {tenant})
        if counts.has_room(tenant, max_queue):
            waiting[tenant] += 1
            counts.add(tenant, 1)
        else:
            assert waiting.total() >= max_queue
            assert waiting[tenant] >= max_queue // num_clients or num_clients == 1
        assert waiting.total() == counts.total <= 2 * max_queue


@given(
    st.lists(st.sampled_from("abc"), max_size=20),
    st.sampled_from("abc"),
    st.integers(1, 8),
    st.integers(1, 12),
)
def test_many_at_once_are_admitted_as_one_after_the_other(
    before: list[str], tenant: str, num_more: int, max_queue: int
) -> None:
    at_once = ClientCounts()
    one_by_one = ClientCounts()
    for name in before:
        at_once.add(name, 1)
        one_by_one.add(name, 1)
    is_admitted = True
    for _ in range(num_more):
        is_admitted &= one_by_one.has_room(tenant, max_queue)
        one_by_one.add(tenant, 1)
    assert at_once.has_room(tenant, max_queue, num_more) is is_admitted


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["open", "queued", "bound", "arrived", "finish", "close", "fail"]),
            st.integers(0, 5),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_the_counts_are_those_of_the_requests(events: list[tuple[str, int, bool]]) -> None:
    """After every event of a request, in any order, no count has to be taken again by looking at all requests."""
    tracker = RequestTracker(100, RouterMetrics().requests)
    usage = Usage(num_prompt_tokens=1, num_completion_tokens=0, num_cached_tokens=0)
    held: list[tuple[ExitStack, TrackedRequest]] = []
    for event, number, is_background in events:
        if event == "open":
            stack = ExitStack()
            priority = BACKGROUND_PRIORITY if is_background else 0
            request = GenerationRequest(request_id="a", prompt="x", tenant=f"t{number}", priority=priority)
            held.append((stack, stack.enter_context(tracker.open(request))))
        elif number < len(held):
            stack, tracked = held[number]
            if event == "finish":
                tracked.finish(Delta(), FinishReason.STOP, usage, LegReport())
            elif event == "arrived":
                tracked.on_delta(Delta(tokens=[Token(index=0, token_id=1)]))
            elif event in ("queued", "bound"):
                tracked.on_queued() if event == "queued" else tracked.on_bound()
            else:
                held.pop(number)[0].close()
        states = Counter(tracked.state for _, tracked in held)
        in_front = [tracked for _, tracked in held if not tracked.is_background]
        assert tracker.num_by_state() == {state.value: states[state] for state in RequestState}
        assert tracker.num_queued == sum(
            tracked.state is RequestState.WAITING_FOR_WORKERS for tracked in in_front
        )
        assert tracker.num_unbound == sum(tracked.holds_slot for tracked in in_front)
        assert tracker.num_held == len(in_front)
        assert tracker.is_idle == (not in_front)
        assert tracker.num_running == states[RequestState.STREAMING]
        assert tracker.num_waiting == len(held) - tracker.num_running - states[RequestState.FINISHED]
    for stack, _ in held:
        stack.close()
    assert not any(tracker.num_by_state().values())
