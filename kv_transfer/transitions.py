"""The rules of a hand-over: pure functions, no I/O and no clock. Production runs exactly these.

``advance_send`` and ``advance_fetch`` take a transfer and what happened and return the transfer afterwards and what has
to be done now, in order. Every change of state is checked against ``SEND_EDGES`` / ``FETCH_EDGES``. An event is
*dropped* (nothing changes, nothing to do) where correct processes can race: the sender's words after the receiver ended
the transfer, a second fetch by the same peer, a peer that does not hold the lease. Any other event that does not fit
raises ImpossibleEventError.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from contract.errors import ErrorKind
from kv_transfer import events as ev
from kv_transfer.states import (
    FETCH_EDGES,
    SEND_EDGES,
    Ending,
    Fetch,
    FetchState,
    ImpossibleEventError,
    Send,
    SendState,
)

SendStep = tuple[Send, list[ev.SendAction]]
FetchStep = tuple[Fetch, list[ev.FetchAction]]


def advance_send(send: Send, event: ev.SendEvent) -> SendStep:
    """The sender's side. Raises ImpossibleEventError."""
    return _SEND_RULES[type(event)](send, event)


def advance_fetch(fetch: Fetch, event: ev.FetchEvent) -> FetchStep:
    """The receiver's side. Raises ImpossibleEventError."""
    return _FETCH_RULES[type(event)](fetch, event)


def _enter_send(send: Send, state: SendState) -> Send:
    if state not in SEND_EDGES[send.state]:
        raise ImpossibleEventError(f"a sent transfer cannot go from {send.state} to {state}")
    return replace(send, state=state)


def _opened(send: Send, event: ev.Opened) -> SendStep:
    opened = replace(_enter_send(send, SendState.OPEN), num_blocks=event.num_blocks, is_opened=True)
    return replace(opened, deadline=event.now + send.lease_seconds), []


def _fetch_arrived(send: Send, event: ev.FetchArrived) -> SendStep:
    if send.ending is not None:
        return send, [ev.Refuse(event.peer, send.ending.kind, send.ending.message)]
    if send.peer == event.peer:
        return send, []
    if send.peer is not None:
        return send, [
            ev.Refuse(event.peer, ErrorKind.TRANSFER_FAILED, "another worker fetches this transfer")
        ]
    if not 0 <= event.from_block <= send.num_blocks:
        message = f"asked from block {event.from_block}; the prompt has {send.num_blocks} blocks"
        return send, [ev.Refuse(event.peer, ErrorKind.TRANSFER_FAILED, message)]
    send = replace(
        send, peer=event.peer, from_block=event.from_block, deadline=event.now + send.lease_seconds
    )
    return send, _announce(send, 0) + _complete_words(send)


def _announce(send: Send, first_block: int) -> list[ev.SendAction]:
    first = max(first_block, send.from_block)
    if send.peer is None or first >= len(send.digests):
        return []
    return [ev.Announce(first, send.digests[first:])]


def _complete_words(send: Send) -> list[ev.SendAction]:
    if send.peer is None or send.state is not SendState.COMPLETE or send.first_tokens is None:
        return []
    return [ev.AnnounceComplete(send.first_tokens)]


def _ordered(send: Send, event: ev.Ordered) -> SendStep:
    if send.has_ended or not send.num_ordered < event.num_blocks <= send.num_blocks:
        raise ImpossibleEventError(
            f"{event.num_blocks} of {send.num_blocks} blocks ordered after {send.num_ordered}"
        )
    return replace(send, num_ordered=event.num_blocks), []


def _range_ready(send: Send, event: ev.RangeReady) -> SendStep:
    first = send.num_digested
    send = _digested(send, event.first_block, len(event.digests))
    if send.has_ended:
        return _digesting_over(send)
    send = replace(send, digests=send.digests + event.digests)
    if send.state is SendState.OPEN:
        send = _enter_send(send, SendState.PUBLISHING)
    actions = _announce(send, first)
    send = _completed(send)
    return send, actions + _complete_words(send)


def _range_failed(send: Send, event: ev.RangeFailed) -> SendStep:
    send = _digested(send, event.first_block, event.num_blocks)
    if send.has_ended:
        return _digesting_over(send)
    return _end_send(send, SendState.NOT_NEEDED, Ending(event.kind, event.message))


def _digested(send: Send, first_block: int, num_blocks: int) -> Send:
    if first_block != send.num_digested or first_block + num_blocks > send.num_ordered:
        raise ImpossibleEventError(
            f"{num_blocks} blocks digested from {first_block};"
            f" {send.num_digested} of {send.num_ordered} ordered ones were"
        )
    return replace(send, num_digested=first_block + num_blocks)


def _digesting_over(send: Send) -> SendStep:
    """What was digested after the end may have been made readable once more: revoke again before reporting."""
    if send.is_digesting:
        return send, []
    return replace(send, num_revokes=send.num_revokes + 1), [ev.Revoke()]


def _completed(send: Send) -> Send:
    if send.first_tokens is None or len(send.digests) < send.num_blocks:
        return send
    return _enter_send(send, SendState.COMPLETE)


def _send_finished(send: Send, event: ev.SendFinished) -> SendStep:
    if send.is_finished:
        raise ImpossibleEventError("a transfer was finished twice")
    send = replace(send, is_finished=True, first_tokens=event.first_tokens)
    if send.has_ended:
        return _report(send)
    if send.num_ordered != send.num_blocks:
        raise ImpossibleEventError(f"finished with {send.num_ordered} of {send.num_blocks} blocks published")
    if send.peer is None:
        send = replace(send, deadline=event.now + send.lease_seconds)
    send = _completed(send)
    return send, _complete_words(send)


def _abandoned(send: Send, event: ev.Abandoned) -> SendStep:
    send = replace(send, is_finished=True)
    if send.has_ended:
        return _report(send)
    return _end_send(send, SendState.NOT_NEEDED, Ending(event.kind, event.message))


def _end_send(send: Send, state: SendState, ending: Ending, *, is_told: bool = True) -> SendStep:
    send = replace(_enter_send(send, state), ending=ending, deadline=None)
    actions: list[ev.SendAction] = []
    if is_told and send.peer is not None:
        actions.append(ev.Refuse(send.peer, ending.kind, ending.message))
    if send.is_opened:
        send = replace(send, num_revokes=send.num_revokes + 1)
        actions.append(ev.Revoke())
    return send, actions


def _let_go(send: Send, event: ev.LetGo) -> SendStep:
    if send.has_ended or send.peer != event.peer:
        return send, []
    ending = Ending(ErrorKind.TRANSFER_FAILED, "the transfer was released")
    return _end_send(send, SendState.RELEASED, ending, is_told=False)


def _peer_gone(send: Send, event: ev.PeerGone) -> SendStep:
    if send.has_ended or send.peer != event.peer:
        return send, []
    return _end_send(send, SendState.EXPIRED, Ending(ErrorKind.WORKER_LOST, event.message), is_told=False)


def _heartbeat(send: Send, event: ev.Heartbeat) -> SendStep:
    if send.has_ended or send.peer != event.peer or send.state is SendState.PARKED:
        return send, []
    return replace(send, deadline=event.now + send.lease_seconds), []


def _tick(send: Send, event: ev.Tick) -> SendStep:
    if send.deadline is None or event.now < send.deadline:
        return send, []
    what = (
        "the prompt was not computed here" if send.state is SendState.PARKED else "its lease was not renewed"
    )
    return _end_send(
        send, SendState.EXPIRED, Ending(ErrorKind.DEADLINE, f"the transfer expired: {what} in time")
    )


def _readers_gone(send: Send, _event: ev.ReadersGone) -> SendStep:
    if send.num_revokes == 0:
        raise ImpossibleEventError("readers were reported gone of a lease that was not revoked")
    return _report(replace(send, num_revokes=send.num_revokes - 1))


def _report(send: Send) -> SendStep:
    is_read = send.num_revokes > 0 or send.is_digesting
    if send.is_reported or is_read or not send.is_finished:
        return send, []
    return replace(send, is_reported=True), [ev.ReportSent()]


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
    fetch = replace(fetch, digests=fetch.digests + event.digests, announced_at=event.now)
    told: list[ev.FetchAction] = [] if known else [ev.TellPublished()]
    fetch, actions = _pull(fetch)
    return fetch, told + actions


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
    return _settle(replace(fetch, first_tokens=event.first_tokens, announced_at=event.now))


def _sender_failed(fetch: Fetch, event: ev.SenderFailed) -> FetchStep:
    if fetch.state in (FetchState.WAITING, FetchState.RESERVED, FetchState.MOVING):
        return _fail_fetch(fetch, event.kind, event.message)
    return fetch, []  # everything is here already, or it has ended


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
    first, end = fetch.num_pulled, len(fetch.digests)
    if not fetch.is_reserved or end <= first:
        return _settle(fetch)
    if fetch.state is FetchState.RESERVED:
        fetch = _enter_fetch(fetch, FetchState.MOVING)
    order = ev.Pull(first, fetch.block_ids[first:end], fetch.digests[first:end])
    return replace(fetch, num_pulled=end, num_posted=fetch.num_posted + 1), [order]


def _settle(fetch: Fetch) -> FetchStep:
    """Pass through LANDED and VERIFIED as far as the counts allow."""
    if fetch.first_tokens is None or not fetch.is_reserved or fetch.has_ended:
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
    fetch = replace(fetch, num_verified=fetch.num_verified + event.num_blocks, verified_at=event.now)
    return _job_over(fetch)


def _job_failed(fetch: Fetch, event: ev.JobFailed) -> FetchStep:
    fetch = _count_down(fetch)
    return _drained(fetch) if fetch.has_ended else _fail_fetch(fetch, event.kind, event.message)


def _job_stopped(fetch: Fetch, _event: ev.JobStopped) -> FetchStep:
    fetch = _count_down(fetch)
    if fetch.has_ended:
        return _drained(fetch)
    return _fail_fetch(fetch, ErrorKind.CANCELLED, "the connector was closed")


def _commit_done(fetch: Fetch, _event: ev.CommitDone) -> FetchStep:
    fetch = _count_down(fetch)
    if fetch.has_ended:
        return _drained(fetch)
    return _enter_fetch(fetch, FetchState.COMMITTED), [ev.AskRelease(), ev.TellReceived()]


def _count_down(fetch: Fetch) -> Fetch:
    if fetch.num_posted == 0:
        raise ImpossibleEventError("a job ended that was not posted")
    return replace(fetch, num_posted=fetch.num_posted - 1)


def _job_over(fetch: Fetch) -> FetchStep:
    fetch = _count_down(fetch)
    return _drained(fetch) if fetch.has_ended else _settle(fetch)


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


def _told(fetch: Fetch, _event: ev.Told) -> FetchStep:
    return (fetch if fetch.state is FetchState.FREE else _enter_fetch(fetch, FetchState.FREE)), []


_SEND_RULES: dict[type, Callable[[Send, Any], SendStep]] = {
    ev.Opened: _opened,
    ev.FetchArrived: _fetch_arrived,
    ev.Ordered: _ordered,
    ev.RangeReady: _range_ready,
    ev.RangeFailed: _range_failed,
    ev.SendFinished: _send_finished,
    ev.Abandoned: _abandoned,
    ev.LetGo: _let_go,
    ev.PeerGone: _peer_gone,
    ev.Heartbeat: _heartbeat,
    ev.Tick: _tick,
    ev.ReadersGone: _readers_gone,
}

_FETCH_RULES: dict[type, Callable[[Fetch, Any], FetchStep]] = {
    ev.Announced: _announced,
    ev.Completed: _sender_completed,
    ev.SenderFailed: _sender_failed,
    ev.Reserved: _reserved,
    ev.PieceLanded: _piece_landed,
    ev.PieceVerified: _piece_verified,
    ev.JobFailed: _job_failed,
    ev.JobStopped: _job_stopped,
    ev.CommitDone: _commit_done,
    ev.Cancelled: _cancelled,
    ev.Told: _told,
}
