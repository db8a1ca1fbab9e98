"""The receiver's rules for a failed read: blocks are read again a bounded number of times, after all reads are terminal."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from engine.connector import FirstToken
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import fetch_side
from kv_transfer.protocol.events import EndReason, RetryStep
from kv_transfer.protocol.fetch_side import Fetch, FetchState, FetchStep, advance_fetch


def pulled(*lengths: int) -> Fetch:
    """Return a fetch whose blocks were announced in ranges of these lengths, with a read posted for each."""
    fetch, first = Fetch(num_blocks=sum(lengths)), 0
    fetch, _ = fetch_side.reserve(fetch, tuple(range(100, 100 + sum(lengths))), 0)
    for length in lengths:
        fetch, (*_, pull) = fetch_side.on_announced(fetch, first, length, 1.0)
        assert isinstance(pull, ev.PullBlocks)
        first += length
    return fetch


BROKEN = ev.JobFailed("transfer_failed", "digest", may_heal=True, retry_steps=tuple(RetryStep))


def test_what_is_not_verified_is_read_again_once_no_read_is_posted() -> None:
    """Blocks verified before the failure stay; later ones are stopped and read again."""
    fetch, _ = advance_fetch(pulled(1, 2, 1), ev.PieceVerified(1, 2.0))
    fetch, actions = advance_fetch(fetch, BROKEN)
    assert actions == [ev.StopReads()]
    fetch, actions = advance_fetch(fetch, ev.JobStopped())
    assert actions == [
        RetryStep.OTHER_TRANSPORT,
        ev.PullBlocks(1, (101, 102, 103)),
    ]
    fetch, actions = advance_fetch(fetch, BROKEN)
    assert actions == [
        RetryStep.SAME_TRANSPORT,
        ev.PullBlocks(1, (101, 102, 103)),
    ]
    fetch, actions = advance_fetch(fetch, BROKEN)
    assert fetch.state is FetchState.QUARANTINED
    assert actions == [ev.FetchNotice.CANCEL, ev.FetchNotice.FAILED]
    assert fetch.ending == EndReason("transfer_failed", "digest")


def test_what_is_announced_while_reads_end_is_read_with_the_rest() -> None:
    fetch = replace(pulled(1, 1), num_blocks=3, block_ids=(100, 101, 102), missing=((0, 3),))
    fetch, _ = advance_fetch(fetch, BROKEN)
    fetch, actions = fetch_side.on_announced(fetch, 2, 1, 2.0)
    assert actions == []
    fetch, actions = advance_fetch(fetch, ev.PieceVerified(1, 2.0))
    assert actions[1:] == [ev.PullBlocks(0, (100, 101, 102))], "behind the failed piece: not counted"


@pytest.mark.parametrize(
    "end",
    [lambda fetch: fetch_side.on_sender_failed(fetch, "worker_lost", "died"), fetch_side.cancel],
    ids=["failed", "cancelled"],
)
def test_a_sender_that_fails_or_a_cancel_ends_it_while_reads_end(
    end: Callable[[Fetch], FetchStep],
) -> None:
    fetch, _ = advance_fetch(pulled(1, 1), BROKEN)
    fetch, actions = end(fetch)
    assert (fetch.state, actions) == (FetchState.DRAINING, [ev.StopReads(), ev.FetchNotice.CANCEL])
    fetch, actions = advance_fetch(fetch, ev.JobStopped())
    assert fetch.state is FetchState.QUARANTINED
    assert not any(isinstance(action, (ev.PullBlocks, RetryStep)) for action in actions)


def test_a_digest_that_fails_behind_the_last_byte_is_read_again() -> None:
    """LANDED goes back to MOVING, in which the sender's failure counts again."""
    fetch, _ = fetch_side.on_completed(pulled(2), 2, (FirstToken(1),))
    fetch, _ = advance_fetch(fetch, ev.PieceLanded(2, 0.0, 1.0))
    assert fetch.state is FetchState.LANDED
    fetch, (again, pull) = advance_fetch(fetch, BROKEN)
    assert (fetch.state, fetch.num_landed) == (FetchState.MOVING, 0)
    assert isinstance(again, RetryStep) and isinstance(pull, ev.PullBlocks)
    failed, _ = fetch_side.on_sender_failed(fetch, "worker_lost", "died")
    assert failed.state is FetchState.DRAINING
