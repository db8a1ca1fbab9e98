"""The sender's side of the control half: every prompt that this worker lends, and every fetch that waits for one."""

import math
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from contract.errors import ErrorKind, InternalError
from contract.layout import Side
from contract.requests import EngineRequest, SendTransfer
from engine.connector import FirstToken, Tables
from kv_transfer.control.outgoing_transfer import AttemptHistory, OutgoingTransfer
from kv_transfer.control.transfers import Transfers, TransferTable
from kv_transfer.counters import Counters
from kv_transfer.links.link import PeerRef
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import messages as msg
from kv_transfer.protocol import send_side
from kv_transfer.protocol.digests import digest_seeds
from kv_transfer.protocol.orders import PublishOrder
from kv_transfer.protocol.reads import LeaseName
from kv_transfer.protocol.send_side import Send, SendState, SendStep
from kv_transfer.settings import LocalWorker

_LEASE_AGES = (
    "lease_age_seconds",
    (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
"""A histogram and the upper bounds of its buckets."""


def _count(counters: Counters, outgoing: OutgoingTransfer, before: SendState, now: float) -> None:
    """Count a lease that has expired, or that has ended, with a change of its state."""
    send = outgoing.send
    # A parked fetch lent nothing.
    if send.state is SendState.EXPIRED and before not in (SendState.EXPIRED, SendState.PARKED):
        counters.add("leases_expired_total")
    if send.is_done and outgoing.key is not None:
        counters.observe(*_LEASE_AGES, now - outgoing.since)


def _ends_of(side: Side, request: EngineRequest, block_ids: Sequence[int], last: Tables) -> tuple[int, ...]:
    """Return the number behind the last block of each group. Raises InternalError for other blocks than these.

    The blocks of windows, and the states, are not lent before the prompt is computed.
    """
    places = side.places_to_send(len(request.prompt_token_ids))
    ends = tuple(accumulate(map(len, places)))
    num_lent = len(block_ids) + sum(map(len, last))
    if num_lent != ends[-1] and (last or not side.group_names):
        raise InternalError(f"{num_lent} blocks are lent for {request.key}; its transfer has {ends[-1]}")
    return ends


class SendTransfers(Transfers):
    """Fulfils ``SenderConnector``; owns the sender's transfers. Thread-safe.

    send, release and look_by (call ``tick`` by then) are called from any thread, and do not block.
    """

    def __init__(
        self,
        worker: LocalWorker,
        send: Callable[[PeerRef, msg.Message], None],
        release: Callable[[LeaseName], None],
        look_by: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
        new_lease: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        super().__init__()
        self._worker = worker
        self._completions = worker.completions
        self._send = send
        self._release = release
        self._look_by = look_by
        self._clock = clock
        self._new_lease = new_lease
        self._block_size = worker.side.layout.block_size
        self._outgoing: TransferTable[OutgoingTransfer] = TransferTable()
        self._history = AttemptHistory()
        worker.counters.add("leases_expired_total", 0)
        worker.counters.declare(*_LEASE_AGES)

    def open_send(
        self, request: EngineRequest, block_ids: list[int], num_cached_tokens: int, last: Tables = ()
    ) -> None:
        """See ``SenderConnector``."""
        transfer = request.transfer
        if not isinstance(transfer, SendTransfer):
            raise InternalError(f"request {request.key} has no transfer to send")
        seeds = digest_seeds(request, self._worker.model_fingerprint, self._worker.side)
        ends = _ends_of(self._worker.side, request, block_ids, last)
        wire_key = (transfer.transfer_id, request.attempt)
        with self._acting():
            outgoing = self._outgoing.get_by_wire(wire_key)
            if self._outgoing.get(request.key) or (outgoing is not None and outgoing.key is not None):
                raise InternalError(f"transfer {wire_key} of request {request.key} is already open")
            if outgoing is None:
                send = send_side.begin(transfer, len(seeds), self._worker.settings.lease_seconds)
                outgoing = OutgoingTransfer(*wire_key, send, self._clock())
            else:
                self._apply(outgoing, send_side.lend(outgoing.send, len(seeds), self._clock()))
            outgoing.lend(request, self._new_lease(), block_ids, seeds, ends, num_cached_tokens)
            # What the prefix cache holds can be published before the first step of the request.
            outgoing.request_blocks(num_cached_tokens, self._block_size, last)
            self._outgoing.add(outgoing)
            self._history.record(wire_key)

    def publish(self, key: str, num_computed_tokens: int, last: Tables = ()) -> None:
        """See ``SenderConnector``."""
        with self._acting():
            self._outgoing.find(key).request_blocks(num_computed_tokens, self._block_size, last)

    def finish_send(self, key: str, first_tokens: list[FirstToken]) -> None:
        """See ``SenderConnector``."""
        with self._acting():
            outgoing = self._outgoing.find(key)
            self._apply(outgoing, send_side.finish(outgoing.send, tuple(first_tokens), self._clock()))
            self._look_by(outgoing.send.deadline)

    def abandon_send(self, key: str, kind: str, message: str) -> None:
        """See ``SenderConnector``. A request that lends nothing (any more) is left alone."""
        with self._acting():
            if outgoing := self._outgoing.get(key):
                self._apply(outgoing, send_side.abandon(outgoing.send, kind, message))

    def pop_orders(self) -> list[PublishOrder]:
        """Return the orders for the blocks that the coming forward pass completes, each order once."""
        orders = []
        with self._acting():
            for outgoing in self._outgoing:
                while outgoing.num_to_order:  # once, or for each group of layers
                    orders.append(outgoing.order(self._worker))
                    self._apply(outgoing, send_side.order(outgoing.send, orders[-1].end_block))
        return orders

    def has_orders(self) -> bool:
        """Return True when ``pop_orders`` would return some."""
        with self._lock:
            return any(outgoing.num_to_order for outgoing in self._outgoing)

    def send_event(self, key: str, event: ev.SendEvent) -> None:
        """Process a report of the data half."""
        with self._acting():
            outgoing = self._outgoing.find(key)
            self._apply(outgoing, outgoing.step_of(event))

    def end_expected(self, key: str, seconds: float) -> None:
        """Send the fetching peer an estimate of when the transfer will be complete. A hint: it is no state (ADR 0014)."""
        with self._acting():
            outgoing = self._outgoing.find(key)
            send = outgoing.send
            if send.peer is not None and not send.has_ended:
                self._post(send.peer, msg.EndExpected(*outgoing.wire_key, outgoing.lease, seconds))

    def lease_idle(self, name: LeaseName) -> None:
        """Process the transport's answer to a release."""
        with self._acting():
            outgoing = self._outgoing.get_by_wire((name.transfer_id, name.attempt))
            if outgoing is not None and outgoing.lease == name.lease:
                self._apply(outgoing, send_side.on_readers_gone(outgoing.send))

    def on_fetch(self, peer: str, message: msg.FetchBlocks) -> None:
        """Process a FETCH: announce, park, or refuse."""
        wire_key = (message.transfer_id, message.attempt)
        now = self._clock()
        with self._acting():
            outgoing = self._outgoing.get_by_wire(wire_key)
            refusal = self._history.refusal_of(wire_key)
            if refusal is not None:
                self._post(peer, msg.TransferFailed(*wire_key, refusal.kind, refusal.message))
            elif outgoing is not None:
                self._apply(outgoing, send_side.on_fetch(outgoing.send, peer, message.from_block, now))
            else:
                settings = self._worker.settings
                parked = OutgoingTransfer.parked(peer, message, settings, now)
                sends = [each.send for each in self._outgoing]
                num_parked = sum(send.state is SendState.PARKED and send.peer == peer for send in sends)
                if num_parked >= settings.max_parked:
                    text = (
                        f"this worker already has {settings.max_parked} fetches parked here, "
                        "for transfers that are not open yet"
                    )
                    self._post(peer, msg.TransferFailed(*wire_key, ErrorKind.OVERLOADED, text))
                else:
                    self._outgoing.add(parked)
                    self._history.record(wire_key)

    def on_release(self, peer: str, message: msg.ReleaseLease | msg.CancelFetch) -> None:
        """Process a RELEASE or CANCEL; drop one for an unknown transfer."""
        with self._acting():
            if outgoing := self._outgoing.get_by_wire((message.transfer_id, message.attempt)):
                is_read = isinstance(message, msg.ReleaseLease)
                rule = send_side.on_released if is_read else send_side.on_fetch_cancelled
                self._apply(outgoing, rule(outgoing.send, peer, self._clock()))

    def on_heartbeat(self, peer: str) -> None:
        """Renew the leases of a peer that is alive."""
        self._apply_all(partial(send_side.on_heartbeat, peer=peer, now=self._clock()))

    def on_peer_gone(self, peer: str, reason: str) -> None:
        """End the leases of a peer that died, but those that another worker may take over."""
        self._apply_all(partial(send_side.on_peer_gone, peer=peer, message=reason, now=self._clock()))

    def tick(self, now: float) -> float:
        """Expire overdue leases and parked fetches; return the next deadline, inf if there is none."""
        self._apply_all(partial(send_side.tick, now=now))
        with self._lock:
            return min((outgoing.send.deadline for outgoing in self._outgoing), default=math.inf)

    def gauges(self) -> dict[str, float]:
        """Return the numbers of active leases and of parked fetches."""
        with self._lock:
            sends = [outgoing.send for outgoing in self._outgoing]
        return {
            "leases_active": sum(send.is_opened and not send.has_ended for send in sends),
            "transfers_parked": sum(send.state is SendState.PARKED for send in sends),
        }

    def debug_state(self) -> list[dict[str, Any]]:
        """Return every transfer as plain data."""
        with self._lock:
            return [outgoing.debug_state(self._clock()) for outgoing in self._outgoing]

    def _apply_all(self, rule: Callable[[Send], SendStep]) -> None:
        with self._acting():
            for outgoing in self._outgoing:
                self._apply(outgoing, rule(outgoing.send))

    def _apply(self, outgoing: OutgoingTransfer, step: SendStep) -> None:
        before = outgoing.send.state
        outgoing.send, actions = step
        _count(self._worker.counters, outgoing, before, self._clock())
        for action in actions:
            match action:
                case ev.SendNotice.REVOKE:
                    self._later.append(partial(self._release, outgoing.name))
                case ev.SendNotice.SENT if outgoing.key is not None:
                    self._completions.add_sent(outgoing.key)
                    self._later.append(self._worker.wake)
                case ev.Refuse():
                    self._post(action.peer, outgoing.message_of(action))
                case _ if outgoing.send.peer is not None:
                    self._post(outgoing.send.peer, outgoing.message_of(action))
        if outgoing.send.is_done:
            self._outgoing.remove(outgoing)
            if outgoing.send.ending is not None:
                self._history.record(outgoing.wire_key, outgoing.send.ending)

    def _post(self, peer: str, message: msg.Message) -> None:
        self._send(PeerRef(peer, is_dialed=False), message)
