"""The receiver's side of the control half: every prompt whose KV this worker fetches."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace

from contract.errors import InternalError
from contract.requests import EngineRequest, ReceiveTransfer, TransferReport
from engine.connector import Drained, Failed, Published, Received, TransferEvent
from kv_transfer.control.arrival_estimates import ArrivalEstimates
from kv_transfer.control.incoming_transfer import IncomingTransfer, WireKey
from kv_transfer.control.transfers import Transfers
from kv_transfer.counters import Completions, Counters
from kv_transfer.links.link import PeerRef
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import messages as msg
from kv_transfer.protocol.digests import digest_seeds
from kv_transfer.protocol.events import NOT_NEEDED, RetryStep
from kv_transfer.protocol.fetch_side import Fetch, FetchState, advance_fetch
from kv_transfer.protocol.handshake import PeerTarget, Session
from kv_transfer.protocol.orders import CommitJob, PullJob
from kv_transfer.protocol.plan import (
    AnnouncedBlocks,
    PeerTerms,
    changed_lease,
    complete_event,
    failed_event,
    published_event,
)
from kv_transfer.protocol.reads import Source
from kv_transfer.transports.alternatives import Alternatives

logger = logging.getLogger(__name__)
_QUARANTINE = frozenset({FetchState.DRAINING, FetchState.QUARANTINED})


@dataclass(frozen=True)
class FetchSettings:
    """What fetching depends on. reads_ahead: layers of blocks before these are announced, if the sender offers them."""

    model_fingerprint: str
    block_size: int
    block_bytes: int
    reads_ahead: bool = True


@dataclass(frozen=True)
class FetchPorts:
    """Where the effects go; each is called from any thread and does not block."""

    dial: Callable[[PeerTarget, msg.Message], None]
    post: Callable[[PeerRef, msg.Message], None]
    pull: Callable[[PullJob], None]
    commit: Callable[[CommitJob], None]
    wake_core: Callable[[], None]
    choose: Callable[[Session, Callable[[Source, Source], bool]], Source]
    alternatives: Alternatives


class FetchTransfers(Transfers):
    """Owns the receiver's transfers and the events for the scheduler. Thread-safe."""

    def __init__(
        self,
        settings: FetchSettings,
        ports: FetchPorts,
        counters: Counters,
        completions: Completions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._ports = ports
        self._clock = clock
        self._alternatives = ports.alternatives
        self._counters = counters
        self._completions = completions
        super().__init__()
        self._incoming: dict[str, IncomingTransfer] = {}
        self._by_wire: dict[WireKey, IncomingTransfer] = {}
        self._sources: dict[PeerRef, Source] = {}
        self._terms: dict[PeerRef, PeerTerms] = {}
        self._events: list[TransferEvent] = []
        self._arrival_estimates = ArrivalEstimates()
        self._failure: str | None = None
        counters.add("transfer_fallbacks_total", 0)
        for retry_step in RetryStep:
            counters.add("transfer_pulled_again_total", 0, rung=retry_step.value)

    def start(self, request: EngineRequest) -> None:
        """See ``SchedulerConnector.start_fetch``."""
        transfer = request.transfer
        if not isinstance(transfer, ReceiveTransfer):
            raise InternalError(f"request {request.key} has nothing to receive")
        seeds = digest_seeds(request, self._settings.model_fingerprint, self._settings.block_size)
        target = PeerTarget(transfer.peer_worker_id, transfer.peer_boot_id, transfer.peer_control)
        incoming = IncomingTransfer(
            request,
            PeerRef(target.boot_id, is_dialed=True),
            transfer.transfer_id,
            request.attempt,
            Fetch(num_blocks=len(seeds)),
            tuple(seeds),
            self._clock(),
        )
        with self._lock:
            terms = self._terms.get(incoming.ref)
        if terms is not None:  # hash a long prompt here, not under the lock when its first block is announced
            incoming.announced = AnnouncedBlocks.of(request, terms)
        with self._acting():
            if request.key in self._incoming or incoming.wire_key in self._by_wire:
                raise InternalError(
                    f"transfer {transfer.transfer_id} of request {request.key} is being fetched"
                )
            self._incoming[request.key] = self._by_wire[incoming.wire_key] = incoming
            self._ports.dial(target, msg.FetchBlocks(transfer.transfer_id, request.attempt))

    def receive_into(self, key: str, block_ids: list[int], num_cached_blocks: int) -> None:
        """See ``SchedulerConnector.receive_into``. A fetch that has just failed is left alone: its event waits."""
        with self._acting():
            incoming = self._incoming.get(key)
            if incoming is not None:
                self._apply(incoming, ev.Reserved(tuple(block_ids), num_cached_blocks))

    def cancel(self, key: str) -> bool:
        """See ``SchedulerConnector.cancel_fetch``. Takes back what was not taken yet."""
        with self._acting():
            incoming = self._incoming.get(key)
            if incoming is not None:
                self._apply(incoming, ev.Cancelled())
            is_free = incoming is None or incoming.fetch.state is FetchState.FREE
            kept = () if is_free else (Drained,)
            self._events = [
                event for event in self._events if event.request_id != key or isinstance(event, kept)
            ]
            self._completions.discard_received(key)
            return is_free

    def take_received(self, key: str) -> Received:
        """See ``SchedulerConnector.take_received``."""
        with self._acting():
            incoming = self._incoming.get(key)
            if incoming is None or incoming.fetch.state is not FetchState.COMMITTED:
                raise InternalError(f"request {key} has received nothing")
            fetch = incoming.fetch
            self._apply(incoming, ev.Acknowledged())
        return Received(
            first_tokens=list(fetch.first_tokens or ()),
            report=TransferReport(
                fetch.exposed_seconds,
                fetch.hidden_seconds,
                incoming.num_bytes,
                len(fetch.copies),
                fetch.copying_seconds,
            ),
        )

    def take_events(self) -> list[TransferEvent]:
        """See ``SchedulerConnector.take_events``. Raises InternalError after ``fail``."""
        with self._acting():
            if self._failure is not None:
                raise InternalError(self._failure)
            taken = self._events
            self._events = []
            for event in taken:
                incoming = self._incoming.get(event.request_id)
                if incoming is not None and not isinstance(event, Published):
                    self._apply(incoming, ev.Acknowledged())
            return taken

    def has_events(self) -> bool:
        """True when ``take_events`` would give some."""
        with self._lock:
            return bool(self._events) or self._failure is not None

    def next_arrival(self) -> float | None:
        """See ``SchedulerConnector.next_arrival``."""
        if not self._incoming:
            return None
        with self._lock:
            return self._arrival_estimates.next(self._clock())

    def fail(self, message: str) -> None:
        """The connector is broken: wake the core, which hears so from ``take_events`` and ends."""
        with self._acting():
            self._failure = self._failure or message
            self._later.append(self._ports.wake_core)

    def fetch_event(self, key: str, event: ev.FetchEvent) -> None:
        """The data half's report about a posted job."""
        with self._acting():
            incoming = self._incoming.get(key)
            if incoming is None:
                raise InternalError(f"a job of {key} ended, which is not fetched")
            before = incoming.fetch.retry_steps
            if isinstance(event, ev.JobFailed) and event.may_heal:
                event = replace(event, retry_steps=self._retry_steps(incoming))
            self._apply(incoming, event)
            if isinstance(event, ev.JobFailed) and incoming.fetch.retry_steps != before:
                logger.warning(
                    "%s; reading again over the %s", event.message, incoming.fetch.retry_steps[-1].words
                )

    def link_up(self, ref: PeerRef, session: Session) -> None:
        """The peer can be read from; over which transport may be known only later."""

        def told(provisional: Source, chosen: Source) -> bool:
            with self._lock:
                current = self._sources.get(ref)
                is_wanted = current is not None and current.token == provisional.token
                if current == provisional:
                    self._sources[ref] = chosen
                    for incoming in self._incoming.values():
                        incoming.source = chosen if incoming.source == provisional else incoming.source
                return is_wanted

        with self._lock:
            self._sources[ref] = self._ports.choose(session, told)
            if session.terms is not None:
                self._terms[ref] = session.terms
        if session.terms is not None:
            self._note(session.worker_id, session.terms)

    def link_down(self, ref: PeerRef, kind: str, message: str) -> Source | None:
        """The peer is dead or refused: every fetch from it that still needs it fails. Returns where it was read."""
        with self._acting():
            source = self._sources.pop(ref, None)
            self._terms.pop(ref, None)
            for incoming in [incoming for incoming in self._incoming.values() if incoming.ref == ref]:
                self._apply(incoming, ev.SenderFailed(kind, message))
        return source

    def message(self, ref: PeerRef, message: msg.SenderMessage) -> None:
        """The sender's word; about a transfer that is not fetched (any more) it is dropped and counted."""
        now = self._clock()
        with self._acting():
            incoming = self._by_wire.get((ref, message.transfer_id, message.attempt))
            if incoming is None:
                self._drop(ref, message)
                return
            match message:
                case msg.BlocksPublished():
                    if not incoming.hears_of(message.lease):
                        self._apply(incoming, changed_lease(message))
                        return
                    incoming.add_grants(message.grants)
                    published = published_event(self._announced(incoming), message, now)
                    if published is not None:
                        self._apply(incoming, published)
                case msg.PromptStarted() if incoming.hears_of(message.lease):
                    self._apply(incoming, ev.Started())
                case msg.LayersReadable() if incoming.lease == message.lease:
                    self._announced_layers(incoming, message)
                case msg.EndExpected() if incoming.lease == message.lease:
                    self._arrival_estimates.expect(incoming.key, ref, now + message.seconds)
                case msg.TransferComplete():
                    num_blocks = incoming.fetch.num_blocks
                    announced = self._announced(incoming)
                    self._apply(incoming, complete_event(announced, message, num_blocks))
                case msg.TransferFailed():
                    self._apply(incoming, failed_event(message))

    def _drop(self, ref: PeerRef, message: msg.SenderMessage) -> None:
        """A sender that still lends is told again that nobody reads: its lease would be renewed while this worker lives."""
        self._counters.add("transfer_stale_messages_total")
        if not isinstance(message, msg.TransferFailed):
            self._ports.post(ref, msg.CancelFetch(message.transfer_id, message.attempt))

    def gauges(self) -> dict[str, float]:
        """How many fetches there are, and how many hold quarantined blocks."""
        with self._lock:
            states = [incoming.fetch.state for incoming in self._incoming.values()]
        return {
            "fetches_active": len(states),
            "transfers_quarantined": sum(state in _QUARANTINE for state in states),
        }

    def quarantine(self) -> dict[str, int]:
        """Fetches that ended with a read outstanding, or whose end the scheduler has not heard, and their blocks."""
        with self._lock:
            fetches = [incoming.fetch for incoming in self._incoming.values()]
        held = [fetch for fetch in fetches if fetch.state in _QUARANTINE]
        return {
            "num_draining": sum(fetch.state is FetchState.DRAINING for fetch in held),
            "num_quarantined": sum(fetch.state is FetchState.QUARANTINED for fetch in held),
            "num_blocks": sum(len(fetch.block_ids) - fetch.num_cached for fetch in held),
        }

    def transports(self) -> list[dict[str, Any]]:
        """What each peer can be read over, and what was given up, as plain data."""
        return self._alternatives.debug_state()

    def debug_state(self) -> list[dict[str, Any]]:
        """Every fetch, as plain data."""
        now = self._clock()
        with self._lock:
            return [incoming.debug_state(now) for incoming in self._incoming.values()]

    def _note(self, worker_id: str, terms: PeerTerms) -> None:
        what = terms.plan.describe() or "nothing"
        logger.info("KV from worker %s (model %s): converted is %s", worker_id, terms.model_fingerprint, what)
        if not terms.plan.is_direct:
            self._counters.add("transfer_converting_links_total")

    def _announced_layers(self, incoming: IncomingTransfer, message: msg.LayersReadable) -> None:
        """Of use where the sender's blocks are ours, byte by byte."""
        if self._settings.reads_ahead and self._announced(incoming) is None:
            incoming.add_grants(message.grants)
            first = message.first_block
            num_blocks = message.num_blocks
            self._apply(incoming, ev.LayerRange(first, num_blocks, message.num_bytes))

    def _announced(self, incoming: IncomingTransfer) -> AnnouncedBlocks | None:
        """What the sender announced by its own blocks; None where it cuts, names and digests them as this worker does."""
        terms = self._terms.get(incoming.ref)
        if incoming.announced is None and terms is not None:
            incoming.announced = AnnouncedBlocks.of(incoming.request, terms)
        return incoming.announced

    def _apply(self, incoming: IncomingTransfer, event: ev.FetchEvent) -> None:
        incoming.fetch, actions = advance_fetch(incoming.fetch, event)
        for action in actions:
            if isinstance(action, ev.FetchOrder):
                self._order(incoming, action)
            else:
                self._tell(incoming, action)
        if incoming.fetch.has_ended:
            self._arrival_estimates.forget(incoming.key)
        if incoming.fetch.state is FetchState.FREE:
            self._incoming.pop(incoming.key, None)
            self._by_wire.pop(incoming.wire_key, None)

    def _order(self, incoming: IncomingTransfer, action: ev.FetchOrder) -> None:
        match action:
            case ev.PullBlocks() | ev.ReadAhead():
                incoming.source = incoming.source or self._sources[incoming.ref]
                job = incoming.job(action, self._settings.block_bytes)
                if job.is_here:
                    self._later.append(
                        partial(self._ports.pull, job)
                    )  # it will be over, and reported, at once
                else:
                    self._ports.pull(job)
            case ev.ReadAgain():
                self._read_again(incoming, action.retry_step)
            case ev.CommitBlocks():
                commit = CommitJob(incoming.key, action.block_ids, incoming.read)
                self._later.append(
                    partial(self._ports.commit, commit)
                )  # it may be done, and reported, at once
            case ev.StopReads():
                self._later.append(incoming.read.stop)

    def _retry_steps(self, incoming: IncomingTransfer) -> tuple[RetryStep, ...]:
        """What may be tried after a read that failed, best first; nothing where the link is gone."""
        linked = self._sources.get(incoming.ref)
        if incoming.source is None or linked is None or linked.token != incoming.source.token:
            return ()
        incoming.other = self._alternatives.beside(incoming.source)
        return (RetryStep.SAME_TRANSPORT,) if incoming.other is None else tuple(RetryStep)

    def _read_again(self, incoming: IncomingTransfer, retry_step: RetryStep) -> None:
        failed = incoming.read_again(retry_step)
        if failed is not None:
            self._sources[incoming.ref] = self._alternatives.failed(failed)
        self._counters.add("transfer_pulled_again_total", rung=retry_step.value)
        self._counters.add("transfer_fallbacks_total", retry_step is RetryStep.OTHER_TRANSPORT)

    def _tell(self, incoming: IncomingTransfer, action: ev.FetchNotice) -> None:
        """Words for the sender and for the scheduler."""
        wire = (incoming.transfer_id, incoming.attempt)
        match action:
            case ev.SendRelease():  # behind the wake of this worker's core: the sender's may take the processor
                self._later.append(partial(self._ports.post, incoming.ref, msg.ReleaseLease(*wire)))
                return
            case ev.SendCancel():
                self._ports.post(incoming.ref, msg.CancelFetch(*wire))
                return
            case ev.ReportPublished():
                terms = self._terms.get(incoming.ref)
                origin = None if terms is None else terms.kv_fingerprint
                self._events.append(Published(incoming.key, origin))
            case ev.ReportFailed():
                if action.kind != NOT_NEEDED:
                    self._counters.add("transfer_failures_total", kind=action.kind)
                self._events.append(Failed(incoming.key, action.kind, action.message))
            case ev.ReportDrained():
                self._events.append(Drained(incoming.key))
            case ev.ReportReceived():
                if incoming.source is not None:
                    self._alternatives.worked(incoming.source)
                self._arrival_estimates.arrived(incoming.key, self._clock())
                self._completions.add_received(incoming.key)
        self._later.append(self._ports.wake_core)
