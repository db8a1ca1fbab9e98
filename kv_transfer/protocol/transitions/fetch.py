"""The receiver's side of a hand-over; see the package for what all rules have in common."""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from contract.errors import ErrorKind
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.states import (
    FETCH_EDGES,
    Ending,
    Fetch,
    FetchState,
    ImpossibleEventError,
    RetryStep,
)

FetchStep = tuple[Fetch, list[ev.FetchAction]]
_LANDED_STATES = (FetchState.LANDED, FetchState.VERIFIED, FetchState.COMMITTED)


def advance_fetch(fetch: Fetch, event: ev.FetchEvent) -> FetchStep:
    """The receiver's side. Raises ImpossibleEventError."""
    return _FETCH_RULES[type(event)](fetch, event)


def _enter_fetch(fetch: Fetch, state: FetchState) -> Fetch:
    if state not in FETCH_EDGES[fetch.state]:
        raise ImpossibleEventError(f"a fetch cannot go from {fetch.state} to {state}")
    return replace(fetch, state=state)


def _announced(fetch: Fetch, event: ev.Announced) -> FetchStep:
    if fetch.has_ended or fetch.state is FetchState.COMMITTED:
        return fetch, []
    known = len(fetch.digests)
    if event.first_block != known or known + len(event.digests) > fetch.num_blocks or not event.digests:
        return _fail_fetch(
            fetch,
            ErrorKind.TRANSFER_FAILED,
            f"the sender announced {len(event.digests)} blocks from {event.first_block};"
            f" {known} of {fetch.num_blocks} were announced",
        )
    fetch, told = _tell_once(fetch)
    fetch, actions = _pull(replace(fetch, digests=fetch.digests + event.digests, announced_at=event.now))
    return fetch, told + actions


def _tell_once(fetch: Fetch) -> FetchStep:
    return replace(fetch, is_told=True), [] if fetch.is_told else [ev.TellPublished()]


def _started(fetch: Fetch, _event: ev.Started) -> FetchStep:
    """Blocks may be reserved from now on: the sender has its own, and needs none of anybody to publish (law 4)."""
    if fetch.has_ended or fetch.state is FetchState.COMMITTED:
        return fetch, []
    return _tell_once(fetch)


def _announced_layers(fetch: Fetch, event: ev.AnnouncedLayers) -> FetchStep:
    """A hint: what is read by it is in nobody's count until its blocks are announced, pulled and verified."""
    first = event.first_block
    end = event.first_block + event.num_blocks
    is_open = fetch.state in (FetchState.RESERVED, FetchState.MOVING) and not fetch.is_retrying
    known = len(fetch.digests)
    ahead = dict(fetch.ahead)
    start = ahead.get(first, 0)
    is_next = max(fetch.num_cached, known) <= first < end <= fetch.num_blocks
    if not is_open or not is_next or event.num_bytes <= start:
        return fetch, []
    if fetch.state is FetchState.RESERVED:
        fetch = _enter_fetch(fetch, FetchState.MOVING)
    ahead[first] = event.num_bytes
    fetch = replace(fetch, ahead=tuple(ahead.items()), num_posted=fetch.num_posted + 1)
    return fetch, [ev.ReadAhead(first, fetch.block_ids[first:end], start, event.num_bytes)]


def _read_ahead_over(fetch: Fetch, event: ev.ReadAheadOver) -> FetchStep:
    if event.copy is not None:
        fetch = replace(fetch, copies=(*fetch.copies, event.copy))
    return _job_over(fetch)


def _sender_completed(fetch: Fetch, event: ev.Completed) -> FetchStep:
    if fetch.has_ended or fetch.first_tokens is not None:
        return fetch, []
    if not event.num_blocks == fetch.num_blocks == len(fetch.digests) or not event.first_tokens:
        return _fail_fetch(
            fetch,
            ErrorKind.TRANSFER_FAILED,
            f"the sender ended with {event.num_blocks} blocks, {len(fetch.digests)} announced, and"
            f" {len(event.first_tokens)} tokens; the prompt has {fetch.num_blocks} blocks",
        )
    return _receive(replace(fetch, first_tokens=event.first_tokens))


def _sender_failed(fetch: Fetch, event: ev.SenderFailed) -> FetchStep:
    is_whole = fetch.first_tokens is not None and fetch.state in _LANDED_STATES
    if fetch.has_ended or is_whole:
        return fetch, []
    return _fail_fetch(fetch, event.kind, event.message)


def _reserved(fetch: Fetch, event: ev.Reserved) -> FetchStep:
    if len(event.block_ids) != fetch.num_blocks or not 0 <= event.num_cached <= fetch.num_blocks:
        raise ImpossibleEventError(
            f"{len(event.block_ids)} blocks reserved, {event.num_cached} cached; the prompt has {fetch.num_blocks}"
        )
    fetch = _enter_fetch(fetch, FetchState.RESERVED)
    fetch = replace(
        fetch,
        block_ids=event.block_ids,
        is_reserved=True,
        num_cached=event.num_cached,
        num_pulled=event.num_cached,
    )
    return _pull(fetch)


def _pull(fetch: Fetch) -> FetchStep:
    """Post a read of what is announced, lacking and not posted yet."""
    first = fetch.num_pulled
    end = len(fetch.digests)
    if not fetch.is_reserved or end <= first or fetch.is_retrying:
        return _settle(fetch)
    if fetch.state is FetchState.RESERVED:
        fetch = _enter_fetch(fetch, FetchState.MOVING)
    order = ev.Pull(first, fetch.block_ids[first:end], fetch.digests[first:end])
    return replace(fetch, num_pulled=end, num_posted=fetch.num_posted + 1), [order]


def _settle(fetch: Fetch) -> FetchStep:
    """Pass through LANDED and VERIFIED as far as the counts allow; the token that the answer goes on with may come later."""
    is_announced = len(fetch.digests) == fetch.num_blocks
    if not is_announced or not fetch.is_reserved or fetch.has_ended or fetch.is_retrying:
        return fetch, []
    missing = fetch.num_blocks - fetch.num_cached
    if fetch.state in (FetchState.RESERVED, FetchState.MOVING) and fetch.num_landed == missing:
        fetch = _enter_fetch(fetch, FetchState.LANDED)
    if fetch.state is not FetchState.LANDED or fetch.num_verified < missing:
        return fetch, []
    fetch = _enter_fetch(fetch, FetchState.VERIFIED)
    fetch = replace(fetch, num_posted=fetch.num_posted + 1)
    return fetch, [ev.CommitBlocks(fetch.block_ids[fetch.num_cached :])]


def _piece_landed(fetch: Fetch, event: ev.PieceLanded) -> FetchStep:
    copies = (*fetch.copies, (event.begin, event.end))
    return _settle(replace(fetch, num_landed=fetch.num_landed + event.num_blocks, copies=copies))


def _piece_verified(fetch: Fetch, event: ev.PieceVerified) -> FetchStep:
    if not fetch.is_retrying:  # else it lies behind a piece that failed, and is read again with it
        fetch = replace(fetch, num_verified=fetch.num_verified + event.num_blocks, verified_at=event.now)
    return _job_over(fetch)


def _job_failed(fetch: Fetch, event: ev.JobFailed) -> FetchStep:
    if event.may_heal and fetch.state in (FetchState.MOVING, FetchState.LANDED):
        retry_step = next((step for step in event.retry_steps if step not in fetch.retry_steps), None)
        if fetch.is_retrying:
            return _job_over(fetch)
        if retry_step is not None:
            fetch, actions = _job_over(_begin_retry(fetch, retry_step))
            return fetch, actions or [ev.StopReads()]
    fetch = _count_down(fetch)
    return _drained(fetch) if fetch.has_ended else _fail_fetch(fetch, event.kind, event.message)


def _job_stopped(fetch: Fetch, _event: ev.JobStopped) -> FetchStep:
    if fetch.has_ended or fetch.is_retrying:
        return _job_over(fetch)
    return _fail_fetch(_count_down(fetch), ErrorKind.CANCELLED, "the connector was closed")


def _begin_retry(fetch: Fetch, retry_step: RetryStep) -> Fetch:
    """What is not verified will be read again."""
    if fetch.state is FetchState.LANDED:
        fetch = _enter_fetch(fetch, FetchState.MOVING)
    return replace(fetch, retry_steps=(*fetch.retry_steps, retry_step), is_retrying=True)


def _turned(fetch: Fetch) -> FetchStep:
    """No read is posted any more, so that none can write where the next one does."""
    num_verified = fetch.num_verified
    fetch = replace(
        fetch,
        is_retrying=False,
        ahead=(),
        num_landed=num_verified,
        num_pulled=fetch.num_cached + num_verified,
    )
    fetch, actions = _pull(fetch)
    return fetch, [ev.ReadAgain(fetch.retry_steps[-1]), *actions]


def _commit_done(fetch: Fetch, _event: ev.CommitDone) -> FetchStep:
    fetch = _count_down(fetch)
    if fetch.has_ended:
        return _drained(fetch)
    return _receive(replace(fetch, is_visible=True))


def _receive(fetch: Fetch) -> FetchStep:
    """The request may run as soon as its blocks are visible here, and the token that follows its prompt is known."""
    if not fetch.is_visible or fetch.first_tokens is None:
        return fetch, []
    return _enter_fetch(fetch, FetchState.COMMITTED), [ev.TellReceived(), ev.AskRelease()]


def _count_down(fetch: Fetch) -> Fetch:
    if fetch.num_posted == 0:
        raise ImpossibleEventError("a job ended that was not posted")
    return replace(fetch, num_posted=fetch.num_posted - 1)


def _job_over(fetch: Fetch) -> FetchStep:
    fetch = _count_down(fetch)
    if fetch.has_ended:
        return _drained(fetch)
    return _turned(fetch) if fetch.is_retrying and not fetch.num_posted else _settle(fetch)


def _fail_fetch(fetch: Fetch, kind: str, message: str) -> FetchStep:
    fetch = replace(fetch, ending=Ending(kind, message))
    if fetch.num_posted:
        return _enter_fetch(fetch, FetchState.DRAINING), [ev.StopReads(), ev.AskCancel()]
    state = FetchState.QUARANTINED if fetch.is_reserved else FetchState.FREE
    return _enter_fetch(fetch, state), [ev.AskCancel(), ev.TellFailed(kind, message)]


def _drained(fetch: Fetch) -> FetchStep:
    if fetch.num_posted:
        return fetch, []
    fetch = _enter_fetch(fetch, FetchState.QUARANTINED)
    if fetch.is_cancelled or fetch.ending is None:
        return fetch, [ev.TellDrained()]
    return fetch, [ev.TellFailed(fetch.ending.kind, fetch.ending.message)]


def _cancelled(fetch: Fetch, _event: ev.Cancelled) -> FetchStep:
    if fetch.state is FetchState.QUARANTINED and fetch.is_cancelled:
        return fetch, []  # the Drained event is on its way
    fetch = replace(fetch, is_cancelled=True)
    if fetch.state in (FetchState.DRAINING, FetchState.FREE):
        return fetch, []
    if fetch.state in (FetchState.QUARANTINED, FetchState.COMMITTED):
        return _enter_fetch(fetch, FetchState.FREE), []
    if fetch.num_posted:
        return _enter_fetch(fetch, FetchState.DRAINING), [ev.StopReads(), ev.AskCancel()]
    return _enter_fetch(fetch, FetchState.FREE), [ev.AskCancel()]


def _acknowledged(fetch: Fetch, _event: ev.Acknowledged) -> FetchStep:
    return (fetch if fetch.state is FetchState.FREE else _enter_fetch(fetch, FetchState.FREE)), []


_FETCH_RULES: dict[type, Callable[[Fetch, Any], FetchStep]] = {
    ev.Announced: _announced,
    ev.Started: _started,
    ev.AnnouncedLayers: _announced_layers,
    ev.Completed: _sender_completed,
    ev.SenderFailed: _sender_failed,
    ev.Reserved: _reserved,
    ev.PieceLanded: _piece_landed,
    ev.PieceVerified: _piece_verified,
    ev.JobFailed: _job_failed,
    ev.JobStopped: _job_stopped,
    ev.ReadAheadOver: _read_ahead_over,
    ev.CommitDone: _commit_done,
    ev.Cancelled: _cancelled,
    ev.Acknowledged: _acknowledged,
}
