"""The sender's side of a transfer: its states, its record and its rules. Pure: no I/O, no clock, no thread.

Production runs exactly these rules. A rule takes a transfer and what happened to it, and returns the transfer afterwards and
the actions to carry out now, in order; ``fetch_side`` does so for the receiver. An event is *dropped* (no change, no
action) where correct processes can race: a second fetch by the same peer, a peer that does not hold the lease, messages
of the sender after the receiver ended the transfer. Any other event that does not fit raises ImpossibleEventError.
"""

import math
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from contract.errors import ErrorKind
from contract.requests import SendTransfer
from engine.connector import FirstToken
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.events import EndReason, ImpossibleEventError


class SendState(StrEnum):
    """The states of a transfer that is sent.

    ::

        a fetch first:   PARKED ─┐
        a prompt first:          └─> OPEN ──> PUBLISHING ──> COMPLETE     blocks are served
                                      │           │             │
                                      └───────────┴─────────────┴──> RELEASED     the receiver has all that it needs
                                                                     EXPIRED      the lease or the parked fetch timed out
                                                                     NOT_NEEDED   this side has abandoned it

    PARKED may also end as RELEASED or EXPIRED. In an end state no block is served; four flags of ``Send`` show what is
    still to come before it can be forgotten: ``is_opened`` (the scheduler has, or had, a request with these blocks and
    gets one report of the end), ``is_finished`` (its request has ended, so it may get that report), ``is_reported`` (it
    got it: its blocks are free) and ``num_revokes`` (readers may be at work in blocks that are not lent any more).
    """

    PARKED = "parked"
    OPEN = "open"
    PUBLISHING = "publishing"
    COMPLETE = "complete"
    RELEASED = "released"
    EXPIRED = "expired"
    NOT_NEEDED = "not_needed"


_SEND_ENDS = frozenset({SendState.RELEASED, SendState.EXPIRED, SendState.NOT_NEEDED})

SEND_EDGES: dict[SendState, frozenset[SendState]] = {
    SendState.PARKED: frozenset({SendState.OPEN, SendState.EXPIRED, SendState.RELEASED}),
    SendState.OPEN: frozenset({SendState.PUBLISHING}) | _SEND_ENDS,
    SendState.PUBLISHING: frozenset({SendState.COMPLETE}) | _SEND_ENDS,
    SendState.COMPLETE: _SEND_ENDS,
    SendState.RELEASED: frozenset(),
    SendState.EXPIRED: frozenset(),
    SendState.NOT_NEEDED: frozenset(),
}


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer on the sender's side.

    num_ordered, num_digested: blocks whose digests were ordered, and are finished or failed. digests: those that are known.
    num_revokes: revocations whose last reader is not reported gone yet. deadline: when the lease (or the parked
    fetch) expires, on the local monotonic clock; inf: never. peer: the boot id of the worker that fetches.
    may_change_peer: another worker may take over, and one that fails does not end the transfer: the KV of a request that was
    handed off stays lent until one has continued it.
    """

    state: SendState
    lease_seconds: float
    num_blocks: int = 0
    is_opened: bool = True
    num_ordered: int = 0
    num_digested: int = 0
    digests: tuple[int, ...] = ()
    first_tokens: tuple[FirstToken, ...] | None = None
    peer: str | None = None
    may_change_peer: bool = False
    from_block: int = 0
    deadline: float = math.inf
    is_finished: bool = False
    is_reported: bool = False
    num_revokes: int = 0
    ending: EndReason | None = None

    @property
    def has_ended(self) -> bool:
        """True if its blocks are not served any more."""
        return self.state in _SEND_ENDS

    @property
    def is_digesting(self) -> bool:
        """True if the data thread may be reading the blocks."""
        return self.num_ordered > self.num_digested

    @property
    def is_done(self) -> bool:
        """True if no event can follow, so that the transfer can be forgotten."""
        return self.has_ended and (self.is_reported or not self.is_opened)


SendStep = tuple[Send, list[ev.SendAction]]


def _enter(send: Send, state: SendState) -> Send:
    if state not in SEND_EDGES[send.state]:
        raise ImpossibleEventError(f"a sent transfer cannot go from {send.state} to {state}")
    return replace(send, state=state)


def begin(transfer: SendTransfer, num_blocks: int, lease_seconds: float) -> Send:
    """Return the transfer of a prompt whose blocks are lent now."""
    return Send(
        state=SendState.OPEN,
        lease_seconds=lease_seconds,
        num_blocks=num_blocks,
        may_change_peer=transfer.may_change_receiver,
    )


def lend(send: Send, num_blocks: int, now: float) -> SendStep:
    """Lend the prompt's blocks, for which a fetch was parked."""
    send = replace(_enter(send, SendState.OPEN), num_blocks=num_blocks, is_opened=True)
    if send.peer is not None and (refusal := _wrong_start(send, send.peer, send.from_block)):
        return replace(send, peer=None, from_block=0, deadline=math.inf), [refusal]
    return replace(send, deadline=now + send.lease_seconds), []


def _wrong_start(send: Send, peer: str, from_block: int) -> ev.Refuse | None:
    if 0 <= from_block <= send.num_blocks:
        return None
    message = f"asked from block {from_block}; the prompt has {send.num_blocks} blocks"
    return ev.Refuse(peer, ErrorKind.TRANSFER_FAILED, message)


def on_fetch(send: Send, peer: str, from_block: int, now: float) -> SendStep:
    """Announce the blocks from ``from_block`` on to a receiver that asks for them, or refuse it."""
    if send.ending is not None:
        return send, [ev.Refuse(peer, send.ending.kind, send.ending.message)]
    if send.peer == peer:
        return send, []
    if send.peer is not None and not send.may_change_peer:
        return send, [ev.Refuse(peer, ErrorKind.TRANSFER_FAILED, "another worker fetches this transfer")]
    if refusal := _wrong_start(send, peer, from_block):
        return send, [refusal]
    refused: list[ev.SendAction] = []
    if send.peer is not None:
        refused.append(
            ev.Refuse(send.peer, ErrorKind.TRANSFER_FAILED, "another worker fetches this transfer now")
        )
    send = replace(send, peer=peer, from_block=from_block, deadline=now + send.lease_seconds)
    return send, refused + _announce_start(send) + _announce(send, 0) + _announce_complete(send)


def _announce(send: Send, first_block: int) -> list[ev.SendAction]:
    first = max(first_block, send.from_block)
    if send.peer is None or first >= len(send.digests):
        return []
    return [ev.BlockRange(first, send.digests[first:])]


def _announce_complete(send: Send) -> list[ev.SendAction]:
    if send.peer is None or send.state is not SendState.COMPLETE or send.first_tokens is None:
        return []
    return [ev.SendNotice.COMPLETE]


def _announce_start(send: Send) -> list[ev.SendAction]:
    """Let the peer reserve its blocks before there is something to read. A hint."""
    is_news = send.num_ordered > 0 and not send.digests and not send.has_ended
    return [ev.SendNotice.START] if is_news and send.peer is not None else []


def order(send: Send, num_blocks: int) -> SendStep:
    """Note that the ranks are ordered to digest the blocks up to ``num_blocks`` after their forward pass."""
    if send.has_ended or not send.num_ordered < num_blocks <= send.num_blocks:
        raise ImpossibleEventError(
            f"{num_blocks} of {send.num_blocks} blocks ordered after {send.num_ordered}"
        )
    is_first = send.num_ordered == 0
    send = replace(send, num_ordered=num_blocks)
    return send, _announce_start(send) if is_first else []


def on_blocks_ready(send: Send, ready: ev.BlockRange) -> SendStep:
    """Announce the next ordered blocks, which are digested and lent."""
    first = send.num_digested
    send = _digested(send, ready.first_block, len(ready.digests))
    if send.has_ended:
        return _digesting_over(send)
    send = replace(send, digests=send.digests + ready.digests)
    if send.state is SendState.OPEN:
        send = _enter(send, SendState.PUBLISHING)
    actions = _announce(send, first)
    send = _completed(send)
    return send, actions + _announce_complete(send)


def on_layers_ready(send: Send, ready: ev.LayerRange) -> SendStep:
    """Announce layers. A hint: a peer that misses it loses nothing. After the end it may have opened the lease again."""
    if send.has_ended:
        return replace(send, num_revokes=send.num_revokes + 1), [ev.SendNotice.REVOKE]
    if send.peer is None or ready.first_block < send.from_block:
        return send, []
    return send, [ready]


def on_range_failed(send: Send, failed: ev.RangeFailed) -> SendStep:
    """End the transfer: the next ordered blocks could not be digested."""
    send = _digested(send, failed.first_block, failed.num_blocks)
    if send.has_ended:
        return _digesting_over(send)
    return _end(send, SendState.NOT_NEEDED, EndReason(failed.kind, failed.message))


def _digested(send: Send, first_block: int, num_blocks: int) -> Send:
    if first_block != send.num_digested or first_block + num_blocks > send.num_ordered:
        raise ImpossibleEventError(
            f"{num_blocks} blocks digested from {first_block};"
            f" {send.num_digested} of {send.num_ordered} ordered ones were"
        )
    return replace(send, num_digested=first_block + num_blocks)


def _digesting_over(send: Send) -> SendStep:
    """Revoke again before reporting: what was digested after the end may have been made readable once more."""
    if send.is_digesting:
        return send, []
    return replace(send, num_revokes=send.num_revokes + 1), [ev.SendNotice.REVOKE]


def _completed(send: Send) -> Send:
    if send.first_tokens is None or len(send.digests) < send.num_blocks:
        return send
    return _enter(send, SendState.COMPLETE)


def finish(send: Send, first_tokens: tuple[FirstToken, ...], now: float) -> SendStep:
    """Note the first tokens: the scheduler called ``finish_send``."""
    if send.is_finished:
        raise ImpossibleEventError("a transfer was finished twice")
    send = replace(send, is_finished=True, first_tokens=first_tokens)
    if send.has_ended:
        return _report(send)
    if send.num_ordered != send.num_blocks:
        raise ImpossibleEventError(f"finished with {send.num_ordered} of {send.num_blocks} blocks published")
    # Nothing renews the lease before a receiver asks for it.
    if send.peer is None:
        send = replace(send, deadline=now + send.lease_seconds)
    send = _completed(send)
    return send, _announce_complete(send)


def abandon(send: Send, kind: str, message: str) -> SendStep:
    """End the transfer: the scheduler called ``abandon_send``."""
    send = replace(send, is_finished=True)
    if send.has_ended:
        return _report(send)
    return _end(send, SendState.NOT_NEEDED, EndReason(kind, message))


def _end(send: Send, state: SendState, ending: EndReason, *, is_announced: bool = True) -> SendStep:
    send = replace(_enter(send, state), ending=ending, deadline=math.inf)
    actions: list[ev.SendAction] = []
    if is_announced and send.peer is not None:
        actions.append(ev.Refuse(send.peer, ending.kind, ending.message))
    if send.is_opened:
        send = replace(send, num_revokes=send.num_revokes + 1)
        actions.append(ev.SendNotice.REVOKE)
    return send, actions


def on_released(send: Send, peer: str, _now: float) -> SendStep:
    """End the transfer: the receiver does not need the blocks any more."""
    if send.has_ended or send.peer != peer:
        return send, []
    ending = EndReason(ErrorKind.TRANSFER_FAILED, "the transfer was released")
    return _end(send, SendState.RELEASED, ending, is_announced=False)


def on_fetch_cancelled(send: Send, peer: str, now: float) -> SendStep:
    """End the transfer, or wait for another receiver: this one needs nothing (more) of it."""
    if send.may_change_peer and not send.has_ended and send.peer == peer:
        return _without_peer(send, now), []
    return on_released(send, peer, now)


def on_peer_gone(send: Send, peer: str, message: str, now: float) -> SendStep:
    """End the transfer, or wait for another receiver, if its receiver died."""
    if send.has_ended or send.peer != peer:
        return send, []
    if send.may_change_peer:
        return _without_peer(send, now), []
    ending = EndReason(ErrorKind.PEER_UNREACHABLE, message)
    return _end(send, SendState.EXPIRED, ending, is_announced=False)


def _without_peer(send: Send, now: float) -> Send:
    return replace(send, peer=None, from_block=0, deadline=now + send.lease_seconds)


def on_heartbeat(send: Send, peer: str, now: float) -> SendStep:
    """Renew the lease if its receiver is alive."""
    # A parked fetch has a deadline of its own: its prompt may never be computed here.
    if send.has_ended or send.peer != peer or send.state is SendState.PARKED:
        return send, []
    return replace(send, deadline=now + send.lease_seconds), []


def tick(send: Send, now: float) -> SendStep:
    """Expire an overdue lease or parked fetch."""
    if now < send.deadline:
        return send, []
    is_parked = send.state is SendState.PARKED
    what = "the prompt was not computed here" if is_parked else "its lease was not renewed"
    ending = EndReason(ErrorKind.DEADLINE, f"the transfer expired: {what} in time")
    return _end(send, SendState.EXPIRED, ending)


def on_readers_gone(send: Send) -> SendStep:
    """Take the answer to one ``REVOKE``: no thread reads the blocks."""
    if send.num_revokes == 0:
        raise ImpossibleEventError("readers were reported gone of a lease that was not revoked")
    return _report(replace(send, num_revokes=send.num_revokes - 1))


def _report(send: Send) -> SendStep:
    is_read = send.num_revokes > 0 or send.is_digesting
    if send.is_reported or is_read or not send.is_finished:
        return send, []
    return replace(send, is_reported=True), [ev.SendNotice.SENT]
