"""What several ranks report goes up as one: in every order of their words, once, and never before the last of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import ErrorKind
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.events import ImpossibleEventError
from kv_transfer.protocol.plan import TransferPlan
from kv_transfer.ranks.gathering import JobGather, Range, RangeGather, has_failed
from kv_transfer.ranks.receivers import ranks_read
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
    """Law 2: whatever the ranks say, in whatever order, nothing goes up before the last, and then one end."""
    gather = JobGather(len(ends))
    gather.open(7)
    *before, end = [gather.over(7, rank, ENDS[end]) for rank, end in enumerate(ends)]
    assert before == [None] * (len(ends) - 1)
    assert gather.waiting_for() == {}
    failures = [name for name in ends if name in ("failed", "lost")]
    if failures:
        assert isinstance(end, ev.JobFailed)
        assert end.message == ENDS[failures[0]].message  # type: ignore[attr-defined]
        assert end.may_heal == ("lost" not in failures)
    elif "stopped" in ends:
        assert end == ev.JobStopped()
    else:
        assert end in (ENDS["verified"], ENDS["committed"])
    assert [name for name in ENDS if has_failed(ENDS[name])] == ["failed", "lost", "stopped"]


def test_the_ranks_are_told_to_stop_once() -> None:
    """Whoever asks first: the first rank that fails, or the control half; and not when all is over."""
    gather = JobGather(2)
    gather.open(1)
    assert [gather.stop(1), gather.stop(1), gather.stop(2)] == [True, False, False]
    gather.open(2)
    for rank in range(2):
        gather.over(2, rank, ev.CommitDone())
    assert not gather.stop(2)


def test_the_last_rank_says_when_all_is_verified() -> None:
    gather = JobGather(2)
    gather.open(1)
    assert gather.over(1, 1, ev.PieceVerified(4, 9.0)) is None
    assert gather.waiting_for() == {1: [0]}
    assert gather.over(1, 0, ev.PieceVerified(4, 8.0)) == ev.PieceVerified(4, 9.0)


def test_what_has_landed_is_what_has_landed_on_all() -> None:
    """Blocks are counted once, when their last share is there."""
    gather = JobGather(2)
    gather.open(1)
    pieces = [ev.PieceLanded(count, float(count), 10.0 + count) for count in range(1, 5)]
    assert gather.landed(1, 0, pieces[2]) is None
    assert gather.landed(1, 1, pieces[0]) == ev.PieceLanded(1, 1.0, 11.0)
    assert gather.landed(1, 1, pieces[3]) == ev.PieceLanded(2, 4.0, 14.0)
    assert gather.landed(1, 0, pieces[1]) == ev.PieceLanded(2, 2.0, 12.0)


def test_a_rank_ends_a_job_once() -> None:
    gather = JobGather(2)
    gather.open(1)
    gather.over(1, 0, ev.CommitDone())
    for number, rank in ((1, 0), (2, 0)):
        with pytest.raises(ImpossibleEventError, match=f"rank {rank} reports of job {number}, which is over"):
            gather.over(number, rank, ev.CommitDone())
        with pytest.raises(ImpossibleEventError):
            gather.landed(number, rank, ev.PieceLanded(1, 0.0, 0.0))


def ready(first: int, count: int, rank: int) -> ev.BlockRange:
    digests = tuple(100 * rank + block for block in range(first, first + count))
    return ev.BlockRange(first, digests, (("shm", bytes([rank])),))


def orders(num_orders: int, failing: dict[int, tuple[int, int]]) -> list[list[Range]]:
    """What each rank says of orders of three blocks, cut in pieces of one; failing: rank → (order, piece)."""
    said: list[list[Range]] = [[] for _ in range(NUM_RANKS)]
    for rank, words in enumerate(said):
        for order in range(num_orders):
            for piece in range(3):
                first = 3 * order + piece
                if failing.get(rank) == (order, piece):
                    words.append(ev.RangeFailed(first, 3 - piece, ErrorKind.INTERNAL, f"on rank {rank}"))
                    break
                words.append(ready(first, 1, rank))
    return said


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
    left, gather, next_block = orders(2, failing), RangeGather(NUM_RANKS), 0
    done = [0] * NUM_RANKS
    while any(left):
        rank = data.draw(st.sampled_from([rank for rank, words in enumerate(left) if words]))
        word = left[rank].pop(0)
        done[rank] = word.first_block + (1 if isinstance(word, ev.BlockRange) else word.num_blocks)
        for told in gather.add("r", rank, word):
            assert told.first_block == next_block
            next_block += len(told.digests) if isinstance(told, ev.BlockRange) else told.num_blocks
            assert next_block <= min(done), "a rank may still be reading these blocks"
            first_failed = min((3 * order + piece for order, piece in failing.values()), default=6)
            if isinstance(told, ev.BlockRange):
                assert told.digests == (told.first_block,)
                assert [other.digests for other in told.others] == [
                    (100 * other + told.first_block,) for other in range(1, NUM_RANKS)
                ]
                assert [dict(other.grants)["shm"] for other in told.others] == [b"\1", b"\2"]
            else:
                assert told.first_block in {3 * order + piece for order, piece in failing.values()}
                assert told.first_block >= first_failed
    assert next_block == 6
    assert gather.waiting() == []


def test_ranks_that_digest_different_ranges_are_a_bug() -> None:
    gather = RangeGather(2)
    gather.add("r", 0, ready(0, 2, 0))
    with pytest.raises(ImpossibleEventError, match="other ranges"):
        gather.add("r", 1, ready(0, 1, 1))


@UNTIMED
@given(plans())
def test_what_is_kept_open_is_what_is_read(plan: TransferPlan) -> None:
    """A rank tries, and forgets, exactly the peer's ranks that the plan has it read from."""
    for rank in range(plan.ours.num_ranks):
        kept = ranks_read(rank, plan.ours.num_ranks, plan.theirs.num_ranks)
        assert list(kept) == plan.ranks_of(rank)
