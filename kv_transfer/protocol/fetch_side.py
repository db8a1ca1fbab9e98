"""The receiver's side of a transfer: its states, its record and its rules; see ``send_side``."""

from collections.abc import Callable
from enum import StrEnum
from itertools import chain
from typing import Any

import msgspec
from msgspec.structs import replace

from contract.errors import ErrorKind
from contract.outputs import TransferReport
from engine.connector import FirstToken
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.events import EndReason, ImpossibleEventError, RetryStep
from kv_transfer.protocol.reads import BlockPart


class FetchState(StrEnum):
    """The states.

    WAITING: asked, no blocks. RESERVED: blocks, no read posted. MOVING: some bytes have arrived or are on their way.
    LANDED: all bytes have arrived. VERIFIED: all digests match. COMMITTED: the blocks are visible and the first token is
    known: the request may run. DRAINING: ended, a posted read is not terminal yet. QUARANTINED: it is, but the scheduler
    has not been notified. FREE: the blocks are the scheduler's.
    """

    WAITING = "waiting"
    RESERVED = "reserved"
    MOVING = "moving"
    LANDED = "landed"
    VERIFIED = "verified"
    COMMITTED = "committed"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    FREE = "free"


_FETCH_ABORT = frozenset({FetchState.DRAINING, FetchState.QUARANTINED, FetchState.FREE})
_LANDED_STATES = (FetchState.LANDED, FetchState.VERIFIED, FetchState.COMMITTED)

FETCH_EDGES: dict[FetchState, frozenset[FetchState]] = {
    FetchState.WAITING: frozenset({FetchState.RESERVED, FetchState.FREE}),
    FetchState.RESERVED: frozenset(
        {FetchState.MOVING, FetchState.LANDED, FetchState.QUARANTINED, FetchState.FREE}
    ),
    FetchState.MOVING: frozenset({FetchState.LANDED}) | _FETCH_ABORT,
    FetchState.LANDED: frozenset({FetchState.VERIFIED, FetchState.MOVING}) | _FETCH_ABORT,
    FetchState.VERIFIED: frozenset({FetchState.COMMITTED}) | _FETCH_ABORT,
    FetchState.COMMITTED: frozenset({FetchState.FREE}),
    FetchState.DRAINING: frozenset({FetchState.QUARANTINED}),
    FetchState.QUARANTINED: frozenset({FetchState.FREE}),
    FetchState.FREE: frozenset(),
}


class Fetch(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer on the receiver's side.

    num_announced: blocks that the sender announced so far. block_ids: empty until the blocks are reserved. num_pulled:
    blocks up to here are cached or posted. num_posted: jobs posted to the data thread that are not terminal. num_verified:
    blocks after the cached ones, up to the first that is not verified. copies: (begin, end) of each copy. retry_steps: those
    that were taken, in order. ahead: (first block, bytes) of blocks of which so many bytes were posted before they were
    announced. missing: the ranges (first, end) that the cache lacks, each of one group of layers; known with ``block_ids``.
    is_published: PUBLISHED was reported. is_retrying: a read has failed; another will be posted once all posted
    ones are terminal. is_visible: the verified blocks are visible to the device.
    """

    num_blocks: int
    state: FetchState = FetchState.WAITING
    num_announced: int = 0
    block_ids: tuple[int, ...] = ()
    num_cached: int = 0
    missing: tuple[tuple[int, int], ...] = ()
    num_pulled: int = 0
    num_posted: int = 0
    num_landed: int = 0
    num_verified: int = 0
    first_tokens: tuple[FirstToken, ...] | None = None
    announced_at: float = 0.0
    verified_at: float = 0.0
    copies: tuple[tuple[float, float], ...] = ()
    ahead: tuple[tuple[int, int], ...] = ()
    retry_steps: tuple[RetryStep, ...] = ()
    is_published: bool = False
    is_retrying: bool = False
    is_visible: bool = False
    ending: EndReason | None = None
    is_cancelled: bool = False

    @property
    def has_ended(self) -> bool:
        """True if no message of the sender matters any more."""
        return self.state in _FETCH_ABORT

    def report(self, num_bytes: int, since: float) -> TransferReport:
        """Return the measurements of a finished fetch that read ``num_bytes``. since: when the KV was asked for."""
        return TransferReport(
            exposed_seconds=max(0.0, self.verified_at - self.announced_at),
            hidden_seconds=sum(max(0.0, min(end, self.announced_at) - begin) for begin, end in self.copies),
            num_bytes=num_bytes,
            num_pieces=len(self.copies),
            copying_seconds=sum(end - begin for begin, end in self.copies),
            waiting_seconds=max(0.0, self.announced_at - since),
        )


FetchStep = tuple[Fetch, list[ev.FetchAction]]


def advance_fetch(fetch: Fetch, event: ev.FetchEvent) -> FetchStep:
    """Return the transfer after a report of the data half, and what to do. Raises ImpossibleEventError.

    Each report but PieceLanded ends a posted job. Once the fetch has ended, it only matters how many are left.
    """
    if not isinstance(event, ev.PieceLanded):
        if fetch.num_posted == 0:
            raise ImpossibleEventError("a job ended that was not posted")
        fetch = replace(fetch, num_posted=fetch.num_posted - 1)
        if fetch.has_ended:
            return _drained(fetch)
    return _FETCH_RULES[type(event)](fetch, event)


def _enter(fetch: Fetch, state: FetchState) -> Fetch:
    if state not in FETCH_EDGES[fetch.state]:
        raise ImpossibleEventError(f"a fetch cannot go from {fetch.state} to {state}")
    return replace(fetch, state=state)


def on_announced(fetch: Fetch, first_block: int, num_blocks: int, now: float) -> FetchStep:
    """Read the blocks from ``first_block`` on, which the sender published, or fail if they do not follow the others."""
    if fetch.has_ended or fetch.state is FetchState.COMMITTED:
        return fetch, []
    known = fetch.num_announced
    total = fetch.num_blocks
    if first_block != known or not 0 < num_blocks <= total - known:
        text = (
            f"the sender announced {num_blocks} blocks from {first_block}; {known} of {total} were announced"
        )
        return _fail(fetch, ErrorKind.TRANSFER_FAILED, text)
    fetch, reports = _report_published(fetch)
    fetch, actions = _pull(replace(fetch, num_announced=known + num_blocks, announced_at=now))
    return fetch, reports + actions


def _report_published(fetch: Fetch) -> FetchStep:
    return replace(fetch, is_published=True), [] if fetch.is_published else [ev.FetchNotice.PUBLISHED]


def on_started(fetch: Fetch) -> FetchStep:
    """Let blocks be reserved: the sender computes in blocks that it has, and publishes without waiting (law 4)."""
    if fetch.has_ended or fetch.state is FetchState.COMMITTED:
        return fetch, []
    return _report_published(fetch)


def on_layers(fetch: Fetch, first_block: int, num_blocks: int, num_bytes: int) -> FetchStep:
    """Read ahead the first ``num_bytes`` of each block.

    A hint: the bytes count only when their blocks are announced, pulled and verified.
    """
    end = first_block + num_blocks
    is_open = fetch.state in (FetchState.RESERVED, FetchState.MOVING) and not fetch.is_retrying
    ahead = dict(fetch.ahead)
    start = ahead.get(first_block, 0)
    is_next = max(fetch.num_cached, fetch.num_announced) <= first_block < end <= fetch.num_blocks
    if not is_open or not is_next or num_bytes <= start:
        return fetch, []
    if fetch.state is FetchState.RESERVED:
        fetch = _enter(fetch, FetchState.MOVING)
    ahead[first_block] = num_bytes
    fetch = replace(fetch, ahead=tuple(ahead.items()), num_posted=fetch.num_posted + 1)
    part = BlockPart(start, num_bytes - start)
    return fetch, [ev.PullBlocks(first_block, fetch.block_ids[first_block:end], part)]


def _on_read_ahead_over(fetch: Fetch, event: ev.ReadAheadOver) -> FetchStep:
    if event.copy is not None:
        fetch = replace(fetch, copies=(*fetch.copies, event.copy))
    return _go_on(fetch)


def on_completed(fetch: Fetch, num_blocks: int, first_tokens: tuple[FirstToken, ...]) -> FetchStep:
    """Note the first tokens: the sender published everything, as ``num_blocks`` of our blocks."""
    if fetch.has_ended or fetch.first_tokens is not None:
        return fetch, []
    if not num_blocks == fetch.num_blocks == fetch.num_announced or not first_tokens:
        text = (
            f"the sender ended with {num_blocks} blocks, {fetch.num_announced} announced, and"
            f" {len(first_tokens)} tokens; the prompt has {fetch.num_blocks} blocks"
        )
        return _fail(fetch, ErrorKind.TRANSFER_FAILED, text)
    return _receive(replace(fetch, first_tokens=first_tokens))


def on_sender_failed(fetch: Fetch, kind: str, message: str) -> FetchStep:
    """End the fetch if it still needs the sender, which gave up the transfer or is dead."""
    is_whole = fetch.first_tokens is not None and fetch.state in _LANDED_STATES
    if fetch.has_ended or is_whole:
        return fetch, []
    return _fail(fetch, kind, message)


def reserve(
    fetch: Fetch,
    block_ids: tuple[int, ...],
    num_cached: int,
    missing: tuple[tuple[int, int], ...] | None = None,
) -> FetchStep:
    """Read into these blocks: the scheduler called ``receive_into``. missing: None: all behind ``num_cached`` first ones."""
    if missing is None:
        missing = ((num_cached, fetch.num_blocks),) if num_cached < fetch.num_blocks else ()
    if len(block_ids) != fetch.num_blocks or not 0 <= num_cached <= fetch.num_blocks:
        raise ImpossibleEventError(
            f"{len(block_ids)} blocks reserved, {num_cached} cached; the prompt has {fetch.num_blocks}"
        )
    fetch = replace(
        _enter(fetch, FetchState.RESERVED),
        block_ids=block_ids,
        num_cached=num_cached,
        missing=missing,
        num_pulled=missing[0][0] if missing else fetch.num_blocks,
    )
    return _pull(fetch)


def _pull(fetch: Fetch) -> FetchStep:
    """Post a read of the blocks that are announced, missing and not posted yet, for each group that has some."""
    orders: list[ev.FetchAction] = []
    if not fetch.is_retrying:
        for first, end in fetch.missing:
            start = max(first, fetch.num_pulled)
            if start < (stop := min(end, fetch.num_announced)):
                orders.append(ev.PullBlocks(start, fetch.block_ids[start:stop]))
    if not orders:
        return _settle(fetch)
    if fetch.state is FetchState.RESERVED:
        fetch = _enter(fetch, FetchState.MOVING)
    return replace(fetch, num_pulled=fetch.num_announced, num_posted=fetch.num_posted + len(orders)), orders


def _end_of(fetch: Fetch, num_missing: int) -> int:
    """Return the first block behind the first ``num_missing`` ones that the cache lacks."""
    for first, end in fetch.missing:
        if num_missing <= end - first:
            return first + num_missing
        num_missing -= end - first
    return fetch.num_blocks


def _settle(fetch: Fetch) -> FetchStep:
    """Enter LANDED and VERIFIED as far as the counts allow; the first token may come later."""
    if fetch.num_announced < fetch.num_blocks or not fetch.block_ids or fetch.has_ended or fetch.is_retrying:
        return fetch, []
    missing = fetch.num_blocks - fetch.num_cached
    if fetch.state in (FetchState.RESERVED, FetchState.MOVING) and fetch.num_landed == missing:
        fetch = _enter(fetch, FetchState.LANDED)
    if fetch.state is not FetchState.LANDED or fetch.num_verified < missing:
        return fetch, []
    fetch = replace(_enter(fetch, FetchState.VERIFIED), num_posted=fetch.num_posted + 1)
    missing_ids = [fetch.block_ids[first:end] for first, end in fetch.missing]
    return fetch, [ev.CommitBlocks(tuple(chain.from_iterable(missing_ids)))]


def _on_piece_landed(fetch: Fetch, event: ev.PieceLanded) -> FetchStep:
    copies = (*fetch.copies, (event.begin, event.end))
    return _settle(replace(fetch, num_landed=fetch.num_landed + event.num_blocks, copies=copies))


def _on_piece_verified(fetch: Fetch, event: ev.PieceVerified) -> FetchStep:
    if not fetch.is_retrying:  # else it lies behind a piece that failed, and is read again with it
        fetch = replace(fetch, num_verified=fetch.num_verified + event.num_blocks, verified_at=event.now)
    return _go_on(fetch)


def _on_job_failed(fetch: Fetch, event: ev.JobFailed) -> FetchStep:
    if event.may_heal and fetch.state in (FetchState.MOVING, FetchState.LANDED):
        retry_step = next((step for step in event.retry_steps if step not in fetch.retry_steps), None)
        # It was posted before the read that failed first: both are read again together.
        if fetch.is_retrying:
            return _go_on(fetch)
        if retry_step is not None:
            if fetch.state is FetchState.LANDED:
                fetch = _enter(fetch, FetchState.MOVING)
            fetch = replace(fetch, retry_steps=(*fetch.retry_steps, retry_step), is_retrying=True)
            fetch, actions = _go_on(fetch)
            return fetch, actions or [ev.StopReads()]
    return _fail(fetch, event.kind, event.message)


def _on_job_stopped(fetch: Fetch, _event: ev.JobStopped) -> FetchStep:
    if fetch.is_retrying:
        return _go_on(fetch)
    return _fail(fetch, ErrorKind.CANCELLED, "the connector was closed")


def _read_again(fetch: Fetch) -> FetchStep:
    """Read what is not verified again. No read is posted any more, so none can write where the next one does."""
    num_verified = fetch.num_verified
    fetch = replace(
        fetch,
        is_retrying=False,
        ahead=(),
        num_landed=num_verified,
        num_pulled=_end_of(fetch, num_verified),
    )
    fetch, actions = _pull(fetch)
    return fetch, [fetch.retry_steps[-1], *actions]


def _on_commit_done(fetch: Fetch, _event: ev.CommitDone) -> FetchStep:
    return _receive(replace(fetch, is_visible=True))


def _receive(fetch: Fetch) -> FetchStep:
    """Let the request run once its blocks are visible and the token after its prompt is known."""
    if not fetch.is_visible or fetch.first_tokens is None:
        return fetch, []
    return _enter(fetch, FetchState.COMMITTED), [ev.FetchNotice.RECEIVED, ev.FetchNotice.RELEASE]


def _go_on(fetch: Fetch) -> FetchStep:
    return _read_again(fetch) if fetch.is_retrying and not fetch.num_posted else _settle(fetch)


def _fail(fetch: Fetch, kind: str, message: str) -> FetchStep:
    fetch = replace(fetch, ending=EndReason(kind, message))
    if fetch.num_posted:
        return _enter(fetch, FetchState.DRAINING), [ev.StopReads(), ev.FetchNotice.CANCEL]
    state = FetchState.QUARANTINED if fetch.block_ids else FetchState.FREE
    return _enter(fetch, state), [ev.FetchNotice.CANCEL, ev.FetchNotice.FAILED]


def _drained(fetch: Fetch) -> FetchStep:
    if fetch.num_posted:
        return fetch, []
    fetch = _enter(fetch, FetchState.QUARANTINED)
    is_cancelled = fetch.is_cancelled or fetch.ending is None
    return fetch, [ev.FetchNotice.DRAINED if is_cancelled else ev.FetchNotice.FAILED]


def cancel(fetch: Fetch) -> FetchStep:
    """End the fetch: the scheduler called ``cancel_fetch``."""
    if fetch.state is FetchState.QUARANTINED and fetch.is_cancelled:
        return fetch, []  # the Drained event is on its way
    fetch = replace(fetch, is_cancelled=True)
    if fetch.state in (FetchState.DRAINING, FetchState.FREE):
        return fetch, []
    if fetch.state in (FetchState.QUARANTINED, FetchState.COMMITTED):
        return _enter(fetch, FetchState.FREE), []
    if fetch.num_posted:
        return _enter(fetch, FetchState.DRAINING), [ev.StopReads(), ev.FetchNotice.CANCEL]
    return _enter(fetch, FetchState.FREE), [ev.FetchNotice.CANCEL]


def acknowledge(fetch: Fetch) -> FetchStep:
    """Free the blocks: the scheduler has taken the last event (or called ``pop_received``)."""
    return (fetch if fetch.state is FetchState.FREE else _enter(fetch, FetchState.FREE)), []


_FETCH_RULES: dict[type, Callable[[Fetch, Any], FetchStep]] = {
    ev.PieceLanded: _on_piece_landed,
    ev.PieceVerified: _on_piece_verified,
    ev.JobFailed: _on_job_failed,
    ev.JobStopped: _on_job_stopped,
    ev.ReadAheadOver: _on_read_ahead_over,
    ev.CommitDone: _on_commit_done,
}
