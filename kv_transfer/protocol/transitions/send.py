"""The sender's side of a hand-over; see the package for what all rules have in common."""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from contract.errors import ErrorKind
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.states import SEND_EDGES, Ending, ImpossibleEventError, Send, SendState

SendStep = tuple[Send, list[ev.SendAction]]


def advance_send(send: Send, event: ev.SendEvent) -> SendStep:
    """The sender's side. Raises ImpossibleEventError."""
    return _SEND_RULES[type(event)](send, event)


def _enter_send(send: Send, state: SendState) -> Send:
    if state not in SEND_EDGES[send.state]:
        raise ImpossibleEventError(f"a sent transfer cannot go from {send.state} to {state}")
    return replace(send, state=state)


def _opened(send: Send, event: ev.Opened) -> SendStep:
    opened = replace(_enter_send(send, SendState.OPEN), num_blocks=event.num_blocks, is_opened=True)
    if send.peer is not None and (refusal := _wrong_start(opened, send.peer, send.from_block)):
        return replace(opened, peer=None, from_block=0, deadline=None), [refusal]
    return replace(opened, deadline=event.now + send.lease_seconds), []


def _wrong_start(send: Send, peer: str, from_block: int) -> ev.Refuse | None:
    if 0 <= from_block <= send.num_blocks:
        return None
    message = f"asked from block {from_block}; the prompt has {send.num_blocks} blocks"
    return ev.Refuse(peer, ErrorKind.TRANSFER_FAILED, message)


def _fetch_arrived(send: Send, event: ev.FetchArrived) -> SendStep:
    if send.ending is not None:
        return send, [ev.Refuse(event.peer, send.ending.kind, send.ending.message)]
    if send.peer == event.peer:
        return send, []
    if send.peer is not None:
        return send, [
            ev.Refuse(event.peer, ErrorKind.TRANSFER_FAILED, "another worker fetches this transfer")
        ]
    if refusal := _wrong_start(send, event.peer, event.from_block):
        return send, [refusal]
    send = replace(
        send, peer=event.peer, from_block=event.from_block, deadline=event.now + send.lease_seconds
    )
    return send, _start_words(send) + _announce(send, 0) + _complete_words(send)


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
    is_first = send.num_ordered == 0
    send = replace(send, num_ordered=event.num_blocks)
    return send, _start_words(send) if is_first else []


def _start_words(send: Send) -> list[ev.SendAction]:
    """So that the peer has its blocks by the time that there is something to read. A hint, as ``AnnounceLayers``."""
    is_news = send.num_ordered > 0 and not send.digests and not send.has_ended
    return [ev.AnnounceStart()] if is_news and send.peer is not None else []


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


def _layers_ready(send: Send, event: ev.LayersReady) -> SendStep:
    """A hint: who comes later, or is not told, misses nothing. Behind the end it may have opened the lease again."""
    if send.has_ended:
        return replace(send, num_revokes=send.num_revokes + 1), [ev.Revoke()]
    if send.peer is None or event.first_block < send.from_block:
        return send, []
    return send, [ev.AnnounceLayers(event.first_block, event.num_blocks, event.num_bytes)]


def _end_foreseen(send: Send, event: ev.EndForeseen) -> SendStep:
    """A hint: it may be wrong, late or missing."""
    is_of_use = send.peer is not None and not send.has_ended
    return send, [ev.AnnounceEnd(event.seconds)] if is_of_use else []


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
    return _end_send(
        send, SendState.EXPIRED, Ending(ErrorKind.PEER_UNREACHABLE, event.message), is_told=False
    )


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


_SEND_RULES: dict[type, Callable[[Send, Any], SendStep]] = {
    ev.Opened: _opened,
    ev.FetchArrived: _fetch_arrived,
    ev.Ordered: _ordered,
    ev.RangeReady: _range_ready,
    ev.LayersReady: _layers_ready,
    ev.EndForeseen: _end_foreseen,
    ev.RangeFailed: _range_failed,
    ev.SendFinished: _send_finished,
    ev.Abandoned: _abandoned,
    ev.LetGo: _let_go,
    ev.PeerGone: _peer_gone,
    ev.Heartbeat: _heartbeat,
    ev.Tick: _tick,
    ev.ReadersGone: _readers_gone,
}
