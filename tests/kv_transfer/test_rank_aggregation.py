"""Reports of several ranks become one report: in every order, once, and never before the last of them."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import ErrorKind
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.events import ImpossibleEventError
from kv_transfer.protocol.plan import TransferPlan
from kv_transfer.protocol.reads import Read, ReadRequest, Source
from kv_transfer.ranks import rank_messages as messages
from kv_transfer.ranks.aggregation import JobAggregator, Range, RangeAggregator
from kv_transfer.ranks.rank_data import RankReader
from kv_transfer.transports.transport import ReceiverTraits
from tests.kv_transfer.test_plan import UNTIMED, plans

NUM_RANKS = 3
ENDS: dict[str, ev.FetchEvent] = {
    "verified": ev.PieceVerified(4, 1.0),
    "failed": ev.JobFailed(ErrorKind.TRANSFER_FAILED, "damaged", may_heal=True),
    "lost": ev.JobFailed(ErrorKind.WORKER_LOST, "gone", may_heal=False),
    "stopped": ev.JobStopped(),
    "committed": ev.CommitDone(),
}


@given(st.lists(st.sampled_from(list(ENDS)), min_size=1, max_size=4))
def test_a_job_is_terminal_when_it_is_so_on_every_rank(ends: list[str]) -> None:
    """Law 2: whatever the ranks report, in whatever order, nothing is returned before the last, and then one end."""
    sent: list[messages.ToRank] = []
    jobs = JobAggregator(len(ends), sent.append)
    key = jobs.begin("r")
    *before, outcome = [jobs.add(key, rank, ENDS[end]) for rank, end in enumerate(ends)]
    assert before == [None] * (len(ends) - 1)
    assert jobs.debug_state() == []
    assert outcome is not None
    request, end = outcome
    assert request == "r"
    failures = [name for name in ends if name in ("failed", "lost")]
    if failures:
        assert isinstance(end, ev.JobFailed)
        first = ENDS[failures[0]]
        assert isinstance(first, ev.JobFailed) and end.message == first.message
        assert end.may_heal == ("lost" not in failures)
    elif "stopped" in ends:
        assert end == ev.JobStopped()
    else:
        assert end in (ENDS["verified"], ENDS["committed"])
    is_of_use = set(ends[:-1]) <= {"verified", "committed"}
    assert sent == ([] if is_of_use else [messages.Stop(key)])


def test_the_ranks_are_asked_to_stop_once() -> None:
    """By the first rank that fails or by the control half; and not when all is over."""
    sent: list[messages.ToRank] = []
    jobs = JobAggregator(2, sent.append)
    key = jobs.begin("r")
    for each in (key, key, "unknown"):
        jobs.stop(each)
    other = jobs.begin("r")
    for rank in range(2):
        jobs.add(other, rank, ev.CommitDone())
    jobs.stop(other)
    assert sent == [messages.Stop(key)]


def test_a_job_is_verified_when_the_last_rank_has_verified_it() -> None:
    jobs = JobAggregator(2, lambda _message: None)
    key = jobs.begin("r")
    assert jobs.add(key, 1, ev.PieceVerified(4, 9.0)) is None
    assert jobs.debug_state() == [{"request": "r", "ranks": [0]}]
    assert jobs.add(key, 0, ev.PieceVerified(4, 8.0)) == ("r", ev.PieceVerified(4, 9.0))


def test_blocks_have_landed_when_they_have_on_all_ranks() -> None:
    """Blocks are counted once, when their last share is there."""
    jobs = JobAggregator(2, lambda _message: None)
    key = jobs.begin("r")
    pieces = [ev.PieceLanded(count, float(count), 10.0 + count) for count in range(1, 5)]
    assert jobs.add(key, 0, pieces[2]) is None
    assert jobs.add(key, 1, pieces[0]) == ("r", ev.PieceLanded(1, 1.0, 11.0))
    assert jobs.add(key, 1, pieces[3]) == ("r", ev.PieceLanded(2, 4.0, 14.0))
    assert jobs.add(key, 0, pieces[1]) == ("r", ev.PieceLanded(2, 2.0, 12.0))


def test_a_rank_ends_a_job_once() -> None:
    jobs = JobAggregator(2, lambda _message: None)
    key = jobs.begin("r")
    jobs.add(key, 0, ev.CommitDone())
    for key, rank in (("1", 0), ("2", 0)):
        for event in (ev.CommitDone(), ev.PieceLanded(1, 0.0, 0.0)):
            with pytest.raises(
                ImpossibleEventError, match=f"rank {rank} reports on job {key}, which is over"
            ):
                jobs.add(key, rank, event)


def ready(first: int, count: int, rank: int) -> ev.BlockRange:
    digests = tuple(100 * rank + block for block in range(first, first + count))
    return ev.BlockRange(first, digests, (("shm", bytes([rank])),))


def orders(num_orders: int, failing: dict[int, tuple[int, int]]) -> list[list[Range]]:
    """Return each rank's reports on orders of three blocks, cut in pieces of one; failing: rank → (order, piece)."""
    reports: list[list[Range]] = [[] for _ in range(NUM_RANKS)]
    for rank, rank_reports in enumerate(reports):
        for order in range(num_orders):
            for piece in range(3):
                first = 3 * order + piece
                if failing.get(rank) == (order, piece):
                    rank_reports.append(
                        ev.RangeFailed(first, 3 - piece, ErrorKind.INTERNAL, f"on rank {rank}")
                    )
                    break
                rank_reports.append(ready(first, 1, rank))
    return reports


@settings(max_examples=100)
@given(
    st.data(),
    st.dictionaries(
        st.integers(0, NUM_RANKS - 1), st.tuples(st.integers(0, 1), st.integers(0, 2)), max_size=3
    ),
)
def test_a_range_is_published_when_every_rank_lends_it(
    data: st.DataObject, failing: dict[int, tuple[int, int]]
) -> None:
    """In every interleaving: blocks go up in order, without a gap, and never before each rank is done with them."""
    left, ranges, next_block = orders(2, failing), RangeAggregator(NUM_RANKS), 0
    done = [0] * NUM_RANKS
    while any(left):
        rank = data.draw(st.sampled_from([rank for rank, rank_reports in enumerate(left) if rank_reports]))
        report = left[rank].pop(0)
        done[rank] = report.first_block + (1 if isinstance(report, ev.BlockRange) else report.num_blocks)
        for done_range in ranges.add("r", rank, report):
            assert done_range.first_block == next_block
            next_block += (
                len(done_range.digests) if isinstance(done_range, ev.BlockRange) else done_range.num_blocks
            )
            assert next_block <= min(done), "a rank may still be reading these blocks"
            first_failed = min((3 * order + piece for order, piece in failing.values()), default=6)
            if isinstance(done_range, ev.BlockRange):
                assert done_range.digests == (done_range.first_block,)
                assert [other.digests for other in done_range.others] == [
                    (100 * other + done_range.first_block,) for other in range(1, NUM_RANKS)
                ]
                assert [dict(other.grants)["shm"] for other in done_range.others] == [b"\1", b"\2"]
            else:
                assert done_range.first_block in {3 * order + piece for order, piece in failing.values()}
                assert done_range.first_block >= first_failed
    assert next_block == 6
    assert ranges.waiting() == []


def test_ranks_that_digest_different_ranges_are_a_bug() -> None:
    ranges = RangeAggregator(2)
    ranges.add("r", 0, ready(0, 2, 0))
    with pytest.raises(ImpossibleEventError, match="different ranges"):
        ranges.add("r", 1, ready(0, 1, 1))


class NotingReceiver:
    """Notes the addresses of the sources that it gets."""

    traits = ReceiverTraits()

    def __init__(self) -> None:
        self.probed: list[str] = []
        self.forgotten: list[str] = []

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        raise AssertionError("nothing is read")

    def probe(self, source: Source, read: Read) -> None:
        self.probed.append(source.address)

    def forget(self, source: Source) -> None:
        self.forgotten.append(source.address)

    def close(self) -> None:
        pass


@UNTIMED
@given(plans())
def test_a_rank_keeps_open_the_ranks_that_it_reads(plan: TransferPlan) -> None:
    """A rank tries, and forgets, exactly the peer's ranks that the plan has it read from."""
    for rank in range(plan.ours.num_ranks):
        receiver = NotingReceiver()
        reader = RankReader(receiver, rank, plan.ours.num_ranks, plan.ours.num_kv_heads)
        first, *others = map(str, range(plan.theirs.num_ranks))
        source = Source("w", "boot", first, "token", other_addresses=tuple(others))
        reader.probe(source, Read())
        reader.forget(source)
        assert receiver.probed == receiver.forgotten == [str(each) for each in plan.ranks_of(rank)]
