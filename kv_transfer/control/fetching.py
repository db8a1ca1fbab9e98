"""The receiver's side of the control half: every prompt whose KV this worker fetches."""

import logging
import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from contract.errors import InternalError, TransferError
from contract.requests import EngineRequest, ReceiveTransfer
from engine.connector import Drained, Published, Received, Tables, TransferEvent
from kv_transfer.control.fetch_effects import FetchEffects, FetchPorts
from kv_transfer.control.incoming_transfer import QUARANTINE, IncomingTransfer
from kv_transfer.control.transfers import Transfers, TransferTable
from kv_transfer.links.link import PeerRef
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import fetch_side
from kv_transfer.protocol import messages as msg
from kv_transfer.protocol.fetch_side import FetchState, FetchStep, advance_fetch
from kv_transfer.protocol.handshake import PeerTarget, Session
from kv_transfer.protocol.reads import Source
from kv_transfer.settings import LocalWorker

logger = logging.getLogger(__name__)


class FetchTransfers(Transfers):
    """Fulfils ``ReceiverConnector``; owns the receiver's transfers and the events for the scheduler. Thread-safe."""

    def __init__(
        self, worker: LocalWorker, ports: FetchPorts, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._worker = worker
        self._completions = worker.completions
        self._ports = ports
        self._clock = clock
        self._incoming: TransferTable[IncomingTransfer] = TransferTable()
        self._effects = FetchEffects(worker, ports, self._later)
        self._failure: str | None = None

    def start_fetch(self, request: EngineRequest) -> None:
        """See ``ReceiverConnector``."""
        transfer = request.transfer
        if not isinstance(transfer, ReceiveTransfer):
            raise InternalError(f"request {request.key} has no transfer to receive")
        target = PeerTarget(transfer.peer_worker_id, transfer.peer_boot_id, transfer.peer_control)
        with self._lock:
            terms = self._effects.terms_of(PeerRef(transfer.peer_boot_id, is_dialed=True))
        # This hashes a long prompt: better here than under the lock at the sender's first message.
        incoming = IncomingTransfer.of(request, transfer, terms, self._clock())
        with self._acting():
            if self._incoming.get(request.key) or self._incoming.get_by_wire(incoming.wire_key):
                raise InternalError(
                    f"transfer {transfer.transfer_id} of request {request.key} is already being fetched"
                )
            self._incoming.add(incoming)
            self._ports.dial(target, msg.FetchBlocks(transfer.transfer_id, request.attempt))

    def receive_into(
        self, key: str, block_ids: list[int], num_cached_blocks: int, other_groups: Tables = ()
    ) -> None:
        """See ``ReceiverConnector``. A fetch that has just failed is left alone: its event waits."""
        with self._acting():
            incoming = self._incoming.get(key)
            if incoming is not None:
                self._apply(incoming, incoming.reserve((block_ids, *other_groups), num_cached_blocks))

    def cancel_fetch(self, key: str) -> bool:
        """See ``ReceiverConnector``. Withdraws events that were not taken yet."""
        with self._acting():
            incoming = self._incoming.get(key)
            if incoming is not None:
                self._apply(incoming, fetch_side.cancel(incoming.fetch))
            is_free = incoming is None or incoming.fetch.state is FetchState.FREE
            # A fetch whose reads are not terminal still has to report when its blocks are free.
            kept = () if is_free else (Drained,)
            self._effects.events = [
                event for event in self._effects.events if event.key != key or isinstance(event, kept)
            ]
            self._completions.discard_received(key)
            return is_free

    def pop_received(self, key: str) -> Received:
        """See ``ReceiverConnector``."""
        with self._acting():
            incoming = self._incoming.get(key)
            if incoming is None or incoming.fetch.state is not FetchState.COMMITTED:
                raise InternalError(f"request {key} has received nothing")
            fetch = incoming.fetch
            report = fetch.report(incoming.num_bytes, incoming.since)
            self._effects.note_received(report)
            received = Received(list(fetch.first_tokens or ()), report, incoming.announced.lacks_heads)
            self._apply(incoming, fetch_side.acknowledge(fetch))
            return received

    def pop_events(self) -> list[TransferEvent]:
        """See ``ReceiverConnector``. Raises InternalError after ``fail``."""
        with self._acting():
            if self._failure is not None:
                raise InternalError(self._failure)
            events = self._effects.events
            self._effects.events = []
            for event in events:
                incoming = self._incoming.get(event.key)
                if incoming is not None and not isinstance(event, Published):
                    self._apply(incoming, fetch_side.acknowledge(incoming.fetch))
            return events

    def has_events(self) -> bool:
        """Return True when ``pop_events`` would return some, or raise."""
        with self._lock:
            return bool(self._effects.events) or self._failure is not None

    def next_arrival(self) -> float | None:
        """See ``ReceiverConnector``."""
        if not self._effects.arrival_estimates.expected:
            return None  # without the lock: several times in each step there is nothing to expect
        with self._lock:
            return self._effects.arrival_estimates.next(self._clock())

    def has_arrived(self) -> bool:
        """See ``ReceiverConnector``."""
        return self._completions.has_received

    def fail(self, message: str) -> None:
        """Make the next ``pop_events`` raise, which ends the engine, and wake the core for it."""
        with self._acting():
            self._failure = self._failure or message
            self._later.append(self._worker.wake)

    def fetch_event(self, key: str, event: ev.FetchEvent) -> None:
        """Process the data half's report about a posted job."""
        with self._acting():
            incoming = self._incoming.find(key)
            before = incoming.fetch.retry_steps
            if isinstance(event, ev.JobFailed) and event.may_heal:
                event = replace(event, retry_steps=self._effects.retries(incoming))
            self._apply(incoming, advance_fetch(incoming.fetch, event))
            if isinstance(event, ev.JobFailed) and incoming.fetch.retry_steps != before:
                way = incoming.fetch.retry_steps[-1].replace("_", " ")
                logger.warning("%s; reading again over the %s", event.message, way)

    def link_up(self, ref: PeerRef, session: Session) -> Source:
        """Read from a peer that has authenticated, and return where. Over which transport may be decided only later."""

        def on_chosen(provisional: Source, chosen: Source) -> bool:
            with self._lock:
                for incoming in self._incoming:
                    incoming.source = chosen if incoming.source == provisional else incoming.source
                return self._effects.choose_source(ref, provisional, chosen)

        with self._lock:
            source = self._ports.choose(session, on_chosen)
            self._effects.add_peer(ref, source, session.terms)
        if session.terms is not None and not session.terms.plan.is_direct:
            self._worker.counters.add("transfer_converting_links_total")
        return source

    def link_down(self, ref: PeerRef, kind: str, message: str) -> Source | None:
        """Fail every fetch that still needs a peer whose link ended. Returns where the peer was read."""
        with self._acting():
            source = self._effects.remove_peer(ref)
            for incoming in self._incoming:
                if incoming.ref == ref:
                    self._apply(incoming, fetch_side.on_sender_failed(incoming.fetch, kind, message))
        return source

    def on_message(self, ref: PeerRef, message: msg.SenderMessage) -> None:
        """Process a sender's message; drop and count one about a transfer that is not being fetched (any more)."""
        now = self._clock()
        with self._acting():
            incoming = self._incoming.get_by_wire((ref, message.transfer_id, message.attempt))
            if incoming is None:
                self._worker.counters.add("transfer_stale_messages_total")
                # The sender still lends: without a cancel, its lease would be renewed for as long as this worker lives.
                if not isinstance(message, msg.TransferFailed):
                    self._ports.post(ref, msg.CancelFetch(message.transfer_id, message.attempt))
                return
            if isinstance(message, msg.EndExpected):
                if incoming.lease == message.lease:
                    self._effects.arrival_estimates.expect(incoming.key, ref, now + message.seconds)
                return
            incoming.use_terms(self._effects.terms_of(ref))
            try:
                step = incoming.step_of(message, now)
            except TransferError as error:
                step = fetch_side.on_sender_failed(incoming.fetch, error.kind, error.message)
            if step is not None:
                self._apply(incoming, step)

    def gauges(self) -> dict[str, float]:
        """Return the numbers of fetches, and of those that hold quarantined blocks."""
        with self._lock:
            states = [incoming.fetch.state for incoming in self._incoming]
        return {
            "fetches_active": len(states),
            "transfers_quarantined": sum(state in QUARANTINE for state in states),
        }

    def debug_state(self) -> dict[str, Any]:
        """Return all fetches, the quarantine, and the peers' transports, as plain data."""
        with self._lock:
            held = [incoming.fetch for incoming in self._incoming if incoming.fetch.state in QUARANTINE]
            return {
                "fetches": [incoming.debug_state(self._clock()) for incoming in self._incoming],
                # Fetches that ended with a read outstanding, or unknown to the scheduler, and their blocks.
                "quarantine": {
                    "num_draining": sum(fetch.state is FetchState.DRAINING for fetch in held),
                    "num_quarantined": sum(fetch.state is FetchState.QUARANTINED for fetch in held),
                    "num_blocks": sum(len(fetch.block_ids) - fetch.num_cached for fetch in held),
                },
                "transports": self._effects.alternatives.debug_state(),
            }

    def _apply(self, incoming: IncomingTransfer, step: FetchStep) -> None:
        incoming.fetch, actions = step
        for action in actions:
            if isinstance(action, ev.FetchOrder):
                self._effects.order(incoming, action)
            else:
                self._effects.report(incoming, action, self._clock())
        if incoming.fetch.has_ended:
            self._effects.arrival_estimates.forget(incoming.key)
        if incoming.fetch.state is FetchState.FREE:
            self._incoming.remove(incoming)
