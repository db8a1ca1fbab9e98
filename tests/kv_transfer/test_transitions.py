"""The rules of a transfer, driven by random events: states move along allowed edges only, and every path ends."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.connector import FirstToken
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import fetch_side, send_side
from kv_transfer.protocol.events import NOT_NEEDED, ImpossibleEventError, RetryStep
from kv_transfer.protocol.fetch_side import FETCH_EDGES, Fetch, FetchState, FetchStep, advance_fetch
from kv_transfer.protocol.send_side import SEND_EDGES, Send, SendState, SendStep

BLOCKS = 4


def reachable(edges: dict[Any, frozenset[Any]], start: Any) -> set[Any]:
    """Return the states that one event can lead to: it may pass through several (all cached: RESERVED → VERIFIED)."""
    found, todo = {start}, [start]
    while todo:
        for state in edges[todo.pop()] - found:
            found.add(state)
            todo.append(state)
    return found


class SendMachine(RuleBasedStateMachine):
    """A prefill side whose scheduler, data thread, transport and two peers do anything that is allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.send = Send(state=SendState.OPEN, lease_seconds=10, num_blocks=BLOCKS)
        self.now = 0.0
        self.pending_revokes = 0
        self.announced = 0
        self.num_reports = 0
        self.num_completes = 0

    @initialize(may_change_peer=st.booleans())
    def begin(self, may_change_peer: bool) -> None:
        self.send = msgspec.structs.replace(self.send, may_change_peer=may_change_peer)

    def apply(self, step: SendStep) -> None:
        before = self.send
        self.send, actions = step
        assert self.send.state in reachable(SEND_EDGES, before.state)
        if self.send.peer != before.peer:  # another one has to be sent everything
            self.announced = 0
            self.num_completes = 0
            assert before.peer is None or self.send.may_change_peer
            left = [action.peer for action in actions if isinstance(action, ev.Refuse)]
            assert left == ([] if None in (before.peer, self.send.peer) else [before.peer])
        for action in actions:
            self.act(action)

    def act(self, action: ev.SendAction) -> None:
        match action:
            case ev.BlockRange():
                assert not self.send.has_ended
                assert action.first_block == self.announced
                self.announced += len(action.digests)
                assert self.announced <= self.send.num_digested
            case ev.SendNotice.COMPLETE:
                self.num_completes += 1
                assert self.announced == BLOCKS
            case ev.SendNotice.REVOKE:
                self.pending_revokes += 1
            case ev.SendNotice.SENT:
                self.num_reports += 1
                assert self.pending_revokes == 0
                assert not self.send.is_digesting

    @precondition(lambda self: not self.send.has_ended and self.send.num_ordered < BLOCKS)
    @rule(count=st.integers(1, BLOCKS))
    def order(self, count: int) -> None:
        self.apply(send_side.order(self.send, min(BLOCKS, self.send.num_ordered + count)))

    @precondition(lambda self: self.send.is_digesting)
    @rule(count=st.integers(1, BLOCKS), works=st.booleans())
    def digest(self, count: int, works: bool) -> None:
        first = self.send.num_digested
        count = min(count, self.send.num_ordered - first)
        if works:
            self.apply(send_side.on_blocks_ready(self.send, ev.BlockRange(first, tuple(range(count)))))
        else:
            self.apply(send_side.on_range_failed(self.send, ev.RangeFailed(first, count, "internal", "bug")))

    @rule(peer=st.sampled_from(["a", "b"]))
    def fetch(self, peer: str) -> None:
        self.apply(send_side.on_fetch(self.send, peer, 0, self.now))

    @precondition(
        lambda self: not self.send.is_finished and (self.send.has_ended or self.send.num_ordered == BLOCKS)
    )
    @rule()
    def finish(self) -> None:
        self.apply(send_side.finish(self.send, (), self.now))

    @rule()
    def abandon(self) -> None:
        self.apply(send_side.abandon(self.send, NOT_NEEDED, "ended at token 0"))

    @rule(peer=st.sampled_from(["a", "b"]), how=st.sampled_from(["let go", "cancelled", "gone", "heard"]))
    def peer_acts(self, peer: str, how: str) -> None:
        before = self.send
        steps: dict[str, SendStep] = {
            "let go": send_side.on_released(self.send, peer, self.now),
            "cancelled": send_side.on_fetch_cancelled(self.send, peer, self.now),
            "gone": send_side.on_peer_gone(self.send, peer, "died", self.now),
            "heard": send_side.on_heartbeat(self.send, peer, self.now),
        }
        self.apply(steps[how])
        if before.peer != peer:
            assert self.send == before
        elif how in ("cancelled", "gone") and not before.has_ended:
            assert self.send.has_ended is not before.may_change_peer
            assert self.send.has_ended or self.send.deadline == self.now + self.send.lease_seconds

    @rule(seconds=st.floats(0.1, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.apply(send_side.tick(self.send, self.now))

    @precondition(lambda self: self.pending_revokes > 0)
    @rule()
    def readers_leave(self) -> None:
        self.pending_revokes -= 1
        self.apply(send_side.on_readers_gone(self.send))

    @invariant()
    def reported_at_most_once(self) -> None:
        assert self.num_reports <= 1
        assert self.num_completes <= 1
        assert self.send.is_reported == (self.num_reports == 1)

    def teardown(self) -> None:
        """From any state: the scheduler gives up, readers and digests end, the report comes."""
        self.abandon()
        while self.send.is_digesting:
            self.digest(BLOCKS, True)
        while self.pending_revokes:
            self.readers_leave()
        assert self.num_reports == 1
        assert self.send.is_done


RUNGS = st.sampled_from([(), (RetryStep.SAME_TRANSPORT,), tuple(RetryStep)])


class FetchMachine(RuleBasedStateMachine):
    """A decode side whose sender, scheduler and data thread do anything that is allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.fetch = Fetch(num_blocks=BLOCKS)
        self.jobs: list[ev.PullBlocks | ev.CommitBlocks] = []
        self.landed: list[ev.PullBlocks] = []
        self.told: list[str] = []
        self.is_stopped = False
        self.committed = False
        self.rungs: list[RetryStep] = []
        self.verified: set[int] = set()

    def apply(self, step: FetchStep) -> None:
        before = self.fetch.state
        self.fetch, actions = step
        assert self.fetch.state in reachable(FETCH_EDGES, before)
        for action in actions:
            match action:
                case ev.PullBlocks():
                    assert action.block_ids == tuple(
                        100 + action.first_block + i for i in range(len(action.block_ids))
                    )
                    reading = {block for job in self.jobs for block in job.block_ids}
                    assert not reading.intersection(action.block_ids), "read twice at once"
                    assert self.verified.isdisjoint(action.block_ids), "a verified block is written again"
                    self.jobs.append(action)
                case RetryStep():
                    assert self.jobs == []
                    self.rungs.append(action)
                    self.is_stopped = False
                case ev.CommitBlocks():
                    self.jobs.append(action)
                case ev.StopReads():
                    self.is_stopped = True
                case ev.FetchNotice.FAILED:
                    self.told.append("failed")
                case ev.FetchNotice.DRAINED:
                    self.told.append("drained")
                case ev.FetchNotice.RECEIVED:
                    self.told.append("received")

    @precondition(lambda self: self.fetch.num_announced < BLOCKS)
    @rule(count=st.integers(1, BLOCKS))
    def announce(self, count: int) -> None:
        first = self.fetch.num_announced
        self.apply(fetch_side.on_announced(self.fetch, first, min(count, BLOCKS - first), 1.0))

    @rule(first=st.integers(0, BLOCKS), count=st.integers(0, BLOCKS + 1))
    def announce_nonsense(self, first: int, count: int) -> None:
        self.apply(fetch_side.on_announced(self.fetch, first, count, 1.0))

    @rule(num_blocks=st.sampled_from([BLOCKS, BLOCKS, BLOCKS, BLOCKS - 1]))
    def complete(self, num_blocks: int) -> None:
        self.apply(fetch_side.on_completed(self.fetch, num_blocks, (FirstToken(1),)))

    @rule()
    def sender_fails(self) -> None:
        self.apply(fetch_side.on_sender_failed(self.fetch, "worker_lost", "died"))

    @precondition(lambda self: self.fetch.state is FetchState.WAITING)
    @rule(num_cached=st.integers(0, BLOCKS))
    def reserve(self, num_cached: int) -> None:
        self.apply(fetch_side.reserve(self.fetch, tuple(range(100, 100 + BLOCKS)), num_cached))

    @precondition(lambda self: any(isinstance(job, ev.PullBlocks) for job in self.jobs[:1]))
    @rule()
    def land(self) -> None:
        job = self.jobs[0]
        if isinstance(job, ev.PullBlocks) and job not in self.landed:
            self.landed.append(job)
            self.apply(advance_fetch(self.fetch, ev.PieceLanded(len(job.block_ids), 0.0, 1.0)))

    @precondition(lambda self: self.jobs)
    @rule(how=st.sampled_from(["done", "done", "failed", "broken", "broken", "stopped"]), rungs=RUNGS)
    def end_job(self, how: str, rungs: tuple[RetryStep, ...] = ()) -> None:
        """End a job. broken: in a way that another read may heal."""
        job = self.jobs[0]
        if how == "stopped" and not self.is_stopped:
            return
        if how == "done":
            self.land()
        self.jobs.pop(0)
        outcomes: dict[str, ev.FetchEvent] = {
            "failed": ev.JobFailed("transfer_failed", "stale"),
            "broken": ev.JobFailed("transfer_failed", "digest", may_heal=True, retry_steps=rungs),
            "stopped": ev.JobStopped(),
            "done": ev.CommitDone()
            if isinstance(job, ev.CommitBlocks)
            else ev.PieceVerified(len(job.block_ids), 3.0),
        }
        self.committed = self.committed or (how == "done" and isinstance(job, ev.CommitBlocks))
        before = self.fetch.num_verified
        self.apply(advance_fetch(self.fetch, outcomes[how]))
        if isinstance(job, ev.PullBlocks) and self.fetch.num_verified > before:
            self.verified.update(job.block_ids)

    @rule()
    def cancel(self) -> None:
        self.apply(fetch_side.cancel(self.fetch))
        if self.fetch.state is FetchState.FREE:
            assert self.jobs == []

    @precondition(lambda self: self.told)
    @rule()
    def take(self) -> None:
        self.apply(fetch_side.acknowledge(self.fetch))

    @invariant()
    def terminal_words_mean_that_no_read_is_posted(self) -> None:
        assert self.fetch.num_posted == len(self.jobs)
        assert len(self.told) <= 1
        if self.told or self.fetch.state in (FetchState.QUARANTINED, FetchState.FREE):
            assert self.jobs == []

    @invariant()
    def every_rung_is_climbed_at_most_once(self) -> None:
        assert len(set(self.rungs)) == len(self.rungs)
        assert self.fetch.retry_steps[: len(self.rungs)] == tuple(self.rungs)
        assert len(self.fetch.retry_steps) - len(self.rungs) in (0, 1)

    @invariant()
    def received_means_everything_was_verified(self) -> None:
        if "received" in self.told:
            assert self.fetch.num_verified == self.fetch.num_landed == BLOCKS - self.fetch.num_cached
            assert self.committed
            assert self.fetch.first_tokens is not None

    def teardown(self) -> None:
        """From any state: a cancel and the end of posted jobs lead to FREE."""
        self.cancel()
        while self.jobs:
            self.end_job("stopped")
        if self.fetch.state is not FetchState.FREE:
            assert self.told[-1] in ("drained", "failed")
            self.take()
        assert self.fetch.state is FetchState.FREE


TestSendMachine = SendMachine.TestCase
TestFetchMachine = FetchMachine.TestCase

OPEN = Send(state=SendState.OPEN, lease_seconds=10, num_blocks=BLOCKS)


@pytest.mark.parametrize(
    "act",
    [
        lambda: send_side.lend(OPEN, BLOCKS, 0.0),
        lambda: send_side.order(OPEN, BLOCKS + 1),
        lambda: send_side.on_blocks_ready(OPEN, ev.BlockRange(0, (1,))),
        lambda: send_side.finish(OPEN, (), 0.0),
        lambda: send_side.on_readers_gone(OPEN),
        lambda: fetch_side.reserve(Fetch(num_blocks=BLOCKS), (1,), 0),
        lambda: advance_fetch(Fetch(num_blocks=BLOCKS), ev.CommitDone()),
    ],
)
def test_impossible_events_raise(act: Callable[[], object]) -> None:
    """An event that no correct caller can cause is a bug, and raises."""
    with pytest.raises(ImpossibleEventError):
        act()


@given(order=st.permutations(["open", "fetch"]))
def test_either_leg_may_come_first(order: list[str]) -> None:
    """A parked fetch and an opened transfer end in the same state."""
    if order[0] == "fetch":
        send = Send(state=SendState.PARKED, lease_seconds=10, is_opened=False, peer="d", deadline=5.0)
        send, _ = send_side.lend(send, BLOCKS, 1.0)
    else:
        send, _ = send_side.on_fetch(OPEN, "d", 0, 1.0)
    assert (send.state, send.peer, send.deadline) == (SendState.OPEN, "d", 11.0)


def test_a_parked_fetch_expires_and_says_so() -> None:
    send = Send(state=SendState.PARKED, lease_seconds=10, is_opened=False, peer="d", deadline=5.0)
    assert send_side.tick(send, 4.9) == (send, [])
    send, actions = send_side.tick(send, 5.0)
    assert send.state is SendState.EXPIRED
    assert send.is_done
    assert [action.kind for action in actions if isinstance(action, ev.Refuse)] == ["deadline"]


def test_an_end_without_a_first_token_is_a_failure() -> None:
    """The scheduler could not continue with it; a peer's message must not end the engine."""
    fetch, actions = fetch_side.on_completed(Fetch(num_blocks=1, num_announced=1), 1, ())
    assert fetch.state is FetchState.FREE
    assert ev.FetchNotice.FAILED in actions
    assert fetch.ending is not None and fetch.ending.kind == "transfer_failed"


def test_times_are_split_at_the_last_announcement() -> None:
    """Copies before it are hidden, the rest up to verified is exposed."""
    fetch = Fetch(
        num_blocks=2, announced_at=5.0, verified_at=7.5, copies=((1.0, 2.0), (4.0, 6.0), (6.0, 7.0))
    )
    report = fetch.report(0, since=0.5)
    assert (report.waiting_seconds, report.hidden_seconds, report.exposed_seconds) == (4.5, 2.0, 2.5)


def reserved() -> Fetch:
    """Return a fetch of one block, which is announced at 5.0 and being read."""
    fetch, _ = fetch_side.on_announced(Fetch(num_blocks=1), 0, 1, 5.0)
    fetch, _ = fetch_side.reserve(fetch, (3,), 0)
    return fetch


def test_the_first_token_is_no_announcement() -> None:
    """The first token may come long after the last range: what was exposed before it stays exposed."""
    fetch, _ = advance_fetch(reserved(), ev.PieceLanded(1, 5.0, 6.0))
    fetch, _ = advance_fetch(fetch, ev.PieceVerified(1, 6.5))
    fetch, _ = fetch_side.on_completed(fetch, 1, (FirstToken(1),))
    assert (fetch.state, fetch.report(0, since=0.0).exposed_seconds) == (FetchState.VERIFIED, 1.5)


def visible_before_first_token() -> Fetch:
    """Return a fetch with all blocks verified and visible, before the sender's first token arrives."""
    fetch, _ = advance_fetch(reserved(), ev.PieceLanded(1, 5.0, 6.0))
    fetch, actions = advance_fetch(fetch, ev.PieceVerified(1, 6.5))
    assert actions == [ev.CommitBlocks((3,))]
    fetch, actions = advance_fetch(fetch, ev.CommitDone())
    assert (fetch.state, actions) == (FetchState.VERIFIED, [])
    return fetch


def test_blocks_become_visible_before_the_first_token_arrives() -> None:
    """The request can run as soon as the first token arrives."""
    fetch, actions = fetch_side.on_completed(visible_before_first_token(), 1, (FirstToken(1),))
    assert (fetch.state, actions) == (FetchState.COMMITTED, [ev.FetchNotice.RECEIVED, ev.FetchNotice.RELEASE])


def test_a_sender_that_dies_before_the_first_token_fails_the_transfer() -> None:
    """Its blocks are here, but the answer cannot continue without the first token."""
    fetch, actions = fetch_side.on_sender_failed(visible_before_first_token(), "worker_lost", "died")
    assert (fetch.state, actions[-1]) == (FetchState.QUARANTINED, ev.FetchNotice.FAILED)
    assert fetch.ending == ev.EndReason("worker_lost", "died")


def test_a_request_that_is_cancelled_before_token_0_has_its_blocks_at_once() -> None:
    fetch, actions = fetch_side.cancel(visible_before_first_token())
    assert (fetch.state, actions) == (FetchState.FREE, [ev.FetchNotice.CANCEL])
