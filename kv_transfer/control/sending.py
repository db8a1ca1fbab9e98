"""The sender's side of the control half: every prompt that this worker lends, and every fetch that waits for one."""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from contract.errors import ErrorKind, InternalError
from contract.requests import EngineRequest, SendTransfer
from engine.connector import FirstToken
from kv_transfer.control.outgoing_transfer import OutgoingTransfer, TransferKey
from kv_transfer.control.transfers import Transfers
from kv_transfer.counters import Completions, Counters
from kv_transfer.links.link import PeerRef
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import messages as msg
from kv_transfer.protocol.digests import digest_seeds
from kv_transfer.protocol.events import EndReason
from kv_transfer.protocol.orders import PublishOrder
from kv_transfer.protocol.reads import LeaseName
from kv_transfer.protocol.send_side import Send, SendState, advance_send

_MAX_REMEMBERED = 4096


@dataclass(frozen=True)
class SendSettings:
    """What lending depends on.

    max_parked: fetches of one peer that may wait for transfers that are not open yet. num_layer_groups: in how many parts
    a prompt's last range is made readable, if it has ``min_split_blocks`` or more. foresees_ends: receivers are told when
    to expect it.
    """

    model_fingerprint: str
    block_size: int
    lease_seconds: float
    parked_seconds: float
    max_parked: int = 1024
    num_layer_groups: int = 1
    min_split_blocks: int = 8
    foresees_ends: bool = True


@dataclass(frozen=True)
class SendPorts:
    """Where the effects go; each is called from any thread and does not block. look_by: call ``tick`` by then."""

    post: Callable[[PeerRef, msg.Message], None]
    release: Callable[[LeaseName], None]
    wake_core: Callable[[], None]
    look_by: Callable[[float | None], None]


class SendTransfers(Transfers):
    """Owns the sender's transfers. Thread-safe; effects that may call back happen outside its lock."""

    def __init__(
        self,
        settings: SendSettings,
        ports: SendPorts,
        counters: Counters,
        completions: Completions,
        clock: Callable[[], float] = time.monotonic,
        new_lease: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self._settings = settings
        self._ports = ports
        self._clock = clock
        self._new_lease = new_lease
        self._counters = counters
        self._completions = completions
        super().__init__()
        self._outgoing: dict[TransferKey, OutgoingTransfer] = {}
        self._by_key: dict[str, OutgoingTransfer] = {}
        self._newest: OrderedDict[str, int] = OrderedDict()
        self._endings: OrderedDict[TransferKey, EndReason] = OrderedDict()
        counters.add("leases_expired_total", 0)

    def open(self, request: EngineRequest, block_ids: list[int], num_cached_tokens: int) -> None:
        """See ``SchedulerConnector.open_send``."""
        transfer = request.transfer
        if not isinstance(transfer, SendTransfer):
            raise InternalError(f"request {request.key} has nothing to send")
        seeds = digest_seeds(request, self._settings.model_fingerprint, self._settings.block_size)
        if len(seeds) != len(block_ids):
            raise InternalError(
                f"{len(block_ids)} blocks lent for {request.key}; its prompt has {len(seeds)}"
            )
        with self._acting():
            wire_key = (transfer.transfer_id, request.attempt)
            outgoing = self._outgoing.get(wire_key)
            if request.key in self._by_key or (outgoing is not None and outgoing.key is not None):
                raise InternalError(f"transfer {wire_key} of request {request.key} is open already")
            if outgoing is None:
                send = Send(
                    state=SendState.OPEN,
                    lease_seconds=self._settings.lease_seconds,
                    num_blocks=len(block_ids),
                )
                outgoing = OutgoingTransfer(*wire_key, send, self._clock())
                self._outgoing[wire_key] = outgoing
            else:
                self._apply(outgoing, ev.SendOpened(len(block_ids), self._clock()))
            outgoing.key, outgoing.lease = request.key, self._new_lease()
            outgoing.block_ids = list(block_ids)
            outgoing.seeds = seeds
            outgoing.num_tokens = len(request.prompt_token_ids)
            outgoing.num_wanted = self._num_full_blocks(outgoing, num_cached_tokens)
            self._by_key[request.key] = outgoing
            self._endings.pop(wire_key, None)
            self._remember_attempt(*wire_key)

    def publish(self, key: str, num_computed_tokens: int) -> None:
        """See ``SchedulerConnector.publish``."""
        with self._acting():
            outgoing = self._find(key)
            outgoing.num_wanted = max(
                outgoing.num_wanted, self._num_full_blocks(outgoing, num_computed_tokens)
            )

    def finish(self, key: str, first_tokens: list[FirstToken]) -> None:
        """See ``SchedulerConnector.finish_send``."""
        with self._acting():
            outgoing = self._find(key)
            self._apply(outgoing, ev.SendFinished(tuple(first_tokens), self._clock()))
            self._ports.look_by(outgoing.send.deadline)

    def abandon(self, key: str, kind: str, message: str) -> None:
        """See ``SchedulerConnector.abandon_send``. A request that lends nothing (any more) is left alone."""
        with self._acting():
            outgoing = self._by_key.get(key)
            if outgoing is not None:
                self._apply(outgoing, ev.Abandoned(kind, message))

    def take_orders(self) -> list[PublishOrder]:
        """What the coming forward pass makes publishable."""
        orders = []
        with self._acting():
            for key, outgoing in self._by_key.items():
                first = outgoing.send.num_ordered
                end = outgoing.num_wanted
                if end > first and not outgoing.send.has_ended:
                    blocks = outgoing.block_ids[first:end]
                    seeds = outgoing.seeds[first:end]
                    is_last = end == outgoing.send.num_blocks
                    parts = self._num_parts(end - first) if is_last else 1
                    announces_end = is_last and self._settings.foresees_ends
                    orders.append(
                        PublishOrder(key, outgoing.name, first, blocks, seeds, parts, announces_end)
                    )
                    self._apply(outgoing, ev.Ordered(end))
        return orders

    def has_orders(self) -> bool:
        """True when ``take_orders`` would give some."""
        with self._lock:
            return any(
                outgoing.num_wanted > outgoing.send.num_ordered and not outgoing.send.has_ended
                for outgoing in self._by_key.values()
            )

    def send_event(self, key: str, event: ev.SendEvent) -> None:
        """The data half's report."""
        with self._acting():
            outgoing = self._find(key)
            if isinstance(event, ev.BlockRange):
                outgoing.note(event)
            elif isinstance(event, ev.LayerRange):
                outgoing.note_layers(event)
            self._apply(outgoing, event)

    def announce_end(self, key: str, seconds: float) -> None:
        """Send the fetching peer an estimate of when the transfer will be complete. A hint: it is no state (ADR 0014)."""
        with self._acting():
            outgoing = self._find(key)
            if not outgoing.send.has_ended:
                self._post(outgoing, msg.EndExpected(*self._wire(outgoing), outgoing.lease, seconds))

    def lease_idle(self, name: LeaseName) -> None:
        """The transport's answer to a release."""
        with self._acting():
            outgoing = self._outgoing.get((name.transfer_id, name.attempt))
            if outgoing is not None and outgoing.lease == name.lease:
                self._apply(outgoing, ev.ReadersGone())

    def fetch_asked(self, peer: str, message: msg.FetchBlocks) -> None:
        """A FETCH: announce, park, or refuse."""
        now = self._clock()
        wire_key = (message.transfer_id, message.attempt)
        with self._acting():
            outgoing = self._outgoing.get(wire_key)
            ending = self._endings.get(wire_key)
            newest = self._newest.get(message.transfer_id, message.attempt)
            if message.attempt < newest:
                ending = EndReason(
                    ErrorKind.TRANSFER_FAILED,
                    f"attempt {message.attempt} of transfer {message.transfer_id} is older than attempt"
                    f" {newest}, which is known here",
                )
                self._refuse(wire_key, ev.Refuse(peer, ending.kind, ending.message))
            elif outgoing is not None:
                self._apply(outgoing, ev.FetchArrived(peer, message.from_block, now))
            elif ending is not None:
                self._refuse(wire_key, ev.Refuse(peer, ending.kind, ending.message))
            else:
                self._park(peer, message, now)

    def let_go(self, peer: str, message: msg.ReleaseLease | msg.CancelFetch) -> None:
        """RELEASE or CANCEL; of a transfer that is not known (any more) it is dropped."""
        with self._acting():
            outgoing = self._outgoing.get((message.transfer_id, message.attempt))
            if outgoing is not None:
                self._apply(outgoing, ev.Released(peer))

    def heard(self, peer: str) -> None:
        """The peer lives: renew its leases."""
        self._apply_all(ev.Heartbeat(peer, self._clock()))

    def peer_gone(self, peer: str, reason: str) -> None:
        """The peer is dead: its leases are over."""
        self._apply_all(ev.PeerGone(peer, reason))

    def tick(self, now: float) -> float | None:
        """Expire what is due; returns the next deadline."""
        self._apply_all(ev.Tick(now))
        with self._lock:
            deadlines = [
                outgoing.send.deadline
                for outgoing in self._outgoing.values()
                if outgoing.send.deadline is not None
            ]
        return min(deadlines, default=None)

    def gauges(self) -> dict[str, float]:
        """How many leases and parked fetches there are now."""
        with self._lock:
            states = [outgoing.send.state for outgoing in self._outgoing.values()]
            num_active = sum(not outgoing.send.has_ended for outgoing in self._by_key.values())
        return {"leases_active": num_active, "transfers_parked": states.count(SendState.PARKED)}

    def debug_state(self) -> list[dict[str, Any]]:
        """Every transfer, as plain data."""
        now = self._clock()
        with self._lock:
            return [
                {
                    "transfer_id": outgoing.transfer_id,
                    "attempt": outgoing.attempt,
                    "request": outgoing.key,
                    "state": str(outgoing.send.state),
                    "age_seconds": now - outgoing.since,
                    "num_blocks": outgoing.send.num_blocks,
                    "num_published": len(outgoing.send.digests),
                    "peer": outgoing.send.peer,
                }
                for outgoing in self._outgoing.values()
            ]

    def _find(self, key: str) -> OutgoingTransfer:
        outgoing = self._by_key.get(key)
        if outgoing is None:
            raise InternalError(f"request {key} lends nothing")
        return outgoing

    def _num_parts(self, num_blocks: int) -> int:
        """Of a prompt's last range, which its receiver waits for; the others cross while later ones are computed."""
        return self._settings.num_layer_groups if num_blocks >= self._settings.min_split_blocks else 1

    def _num_full_blocks(self, outgoing: OutgoingTransfer, num_tokens: int) -> int:
        if num_tokens >= outgoing.num_tokens:
            return len(outgoing.block_ids)
        return num_tokens // self._settings.block_size

    def _remember_attempt(self, transfer_id: str, attempt: int) -> None:
        self._newest[transfer_id] = max(attempt, self._newest.pop(transfer_id, attempt))
        while len(self._newest) > _MAX_REMEMBERED:
            self._newest.popitem(last=False)

    def _park(self, peer: str, message: msg.FetchBlocks, now: float) -> None:
        wire_key = (message.transfer_id, message.attempt)
        most = self._settings.max_parked
        if self._num_parked(peer) >= most:
            text = f"{most} fetches of this worker wait for transfers that are not open here; no more may"
            self._refuse(wire_key, ev.Refuse(peer, ErrorKind.OVERLOADED, text))
            return
        send = Send(
            state=SendState.PARKED,
            lease_seconds=self._settings.lease_seconds,
            is_opened=False,
            peer=peer,
            from_block=message.from_block,
            deadline=now + self._settings.parked_seconds,
        )
        self._outgoing[wire_key] = OutgoingTransfer(*wire_key, send, now)
        self._remember_attempt(*wire_key)

    def _num_parked(self, peer: str) -> int:
        return sum(
            (outgoing.send.state, outgoing.send.peer) == (SendState.PARKED, peer)
            for outgoing in self._outgoing.values()
        )

    def _apply_all(self, event: ev.Heartbeat | ev.PeerGone | ev.Tick) -> None:
        with self._acting():
            for outgoing in list(self._outgoing.values()):
                self._apply(outgoing, event)

    def _apply(self, outgoing: OutgoingTransfer, event: ev.SendEvent) -> None:
        before = outgoing.send.state
        outgoing.send, actions = advance_send(outgoing.send, event)
        if outgoing.send.state is SendState.EXPIRED and before not in (SendState.EXPIRED, SendState.PARKED):
            self._counters.add("leases_expired_total")
        for action in actions:
            self._perform(outgoing, action)
        if outgoing.send.is_done:
            self._forget(outgoing)

    def _perform(self, outgoing: OutgoingTransfer, action: ev.SendAction) -> None:
        match action:
            case ev.BlockRange():
                self._post(outgoing, outgoing.announcement(action))
            case ev.AnnounceStart():
                self._post(outgoing, msg.PromptStarted(*self._wire(outgoing), outgoing.lease))
            case ev.LayerRange():
                self._post(outgoing, outgoing.readable(action))
            case ev.AnnounceComplete():
                tokens = list(action.first_tokens)
                self._post(
                    outgoing, msg.TransferComplete(*self._wire(outgoing), outgoing.send.num_blocks, tokens)
                )
            case ev.Refuse():
                self._refuse(self._wire(outgoing), action)
            case ev.Revoke():
                self._later.append(partial(self._ports.release, outgoing.name))
            case ev.ReportSent() if outgoing.key is not None:
                self._completions.add_sent(outgoing.key)
                self._later.append(self._ports.wake_core)

    def _wire(self, outgoing: OutgoingTransfer) -> TransferKey:
        return outgoing.transfer_id, outgoing.attempt

    def _post(self, outgoing: OutgoingTransfer, message: msg.Message) -> None:
        if outgoing.send.peer is not None:
            self._ports.post(PeerRef(outgoing.send.peer, is_dialed=False), message)

    def _refuse(self, wire_key: TransferKey, refusal: ev.Refuse) -> None:
        message = msg.TransferFailed(*wire_key, refusal.kind, refusal.message)
        self._ports.post(PeerRef(refusal.peer, is_dialed=False), message)

    def _forget(self, outgoing: OutgoingTransfer) -> None:
        wire_key = self._wire(outgoing)
        self._outgoing.pop(wire_key, None)
        if outgoing.key is not None:
            self._by_key.pop(outgoing.key, None)
        if outgoing.send.ending is not None:
            self._endings[wire_key] = outgoing.send.ending
        while len(self._endings) > _MAX_REMEMBERED:
            self._endings.popitem(last=False)
