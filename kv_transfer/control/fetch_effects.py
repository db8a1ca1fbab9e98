"""The effects of the fetches' state machine, on the peers' sources, the expected arrivals and the scheduler's events."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

from contract.outputs import TransferReport
from engine.connector import Drained, Failed, Published, TransferEvent
from kv_transfer.control.incoming_transfer import IncomingTransfer
from kv_transfer.links.link import PeerRef
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import messages as msg
from kv_transfer.protocol.handshake import PeerTarget, Session
from kv_transfer.protocol.orders import CommitJob, PullJob
from kv_transfer.protocol.plan import PeerTerms, TransferPlan
from kv_transfer.protocol.reads import Source
from kv_transfer.settings import LocalWorker
from kv_transfer.transports.choosing import Alternatives

logger = logging.getLogger(__name__)
# Fetches that one sender expects within this time are computed by one step there, and arrive together.
_TOGETHER_SECONDS = 0.002
# A fetch that is later than this is not expected any more.
_OVERDUE_SECONDS = 0.25
_NUM_REMEMBERED = 16
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BYTES = tuple(float(4**power) for power in range(6, 19))
_HISTOGRAMS = {
    "transfer_seconds": _SECONDS,
    "transfer_exposed_seconds": _SECONDS,
    "transfer_size_bytes": _BYTES,
}
"""The histograms of fetches, with the upper bounds of their buckets: seconds, and 4 KiB to 64 GiB."""


class ArrivalEstimates:
    """Owns the expected end of each fetch, by the receiver's clock. Not thread-safe."""

    def __init__(self) -> None:
        self.expected: dict[str, tuple[PeerRef, float]] = {}
        """The sender and the time, by the key of the fetch."""
        self._delays = deque[float](maxlen=_NUM_REMEMBERED)

    def expect(self, key: str, sender: PeerRef, at: float) -> None:
        """Record the sender's newest estimate for a fetch."""
        self.expected[key] = (sender, at)

    def on_arrival(self, key: str, now: float) -> None:
        """Record how late a fetch was, and expect those that belong to the same step at once."""
        if key not in self.expected:
            return
        sender, expected_at = self.expected.pop(key)
        usual = self._usual_delay
        self._delays.append(now - expected_at)
        for other, (its_sender, at) in self.expected.items():
            if its_sender == sender and abs(at - expected_at) < _TOGETHER_SECONDS:
                self.expected[other] = (sender, now - usual)

    def forget(self, key: str) -> None:
        """Stop expecting a fetch that has ended."""
        self.expected.pop(key, None)

    def next(self, now: float) -> float | None:
        """Return when the next fetch is expected, which may be just past; None if no sender has sent an estimate."""
        delay = self._usual_delay
        ends = (at + delay for _, at in self.expected.values())
        return min((end for end in ends if end > now - _OVERDUE_SECONDS), default=None)

    @property
    def _usual_delay(self) -> float:
        return median(self._delays) if self._delays else 0.0


@dataclass(frozen=True)
class FetchPorts:
    """The calls by which the effects leave; from any thread, none blocks.

    pull: returns a call that reads the blocks, if its caller has to make it, without the lock.
    """

    dial: Callable[[PeerTarget, msg.Message], None]
    post: Callable[[PeerRef, msg.Message], None]
    pull: Callable[[PullJob], Callable[[], None] | None]
    commit: Callable[[CommitJob], None]
    choose: Callable[[Session, Callable[[Source, Source], bool]], Source]
    alternatives: Alternatives


class FetchEffects:
    """Owns the peers' sources, the expected arrivals and the events. Used under the lock of ``FetchTransfers``.

    alternatives: the peers' other sources. events: for the scheduler, until it takes them. later: see ``Transfers``.
    """

    def __init__(self, worker: LocalWorker, ports: FetchPorts, later: list[Callable[[], None]]) -> None:
        self._worker = worker
        self._completions = worker.completions
        self._ports = ports
        self._later = later
        self._sources: dict[PeerRef, Source] = {}
        self._own_plan = TransferPlan(worker.side, worker.side)
        self._terms: dict[PeerRef, PeerTerms] = {}
        self.alternatives = ports.alternatives
        self.events: list[TransferEvent] = []
        self.arrival_estimates = ArrivalEstimates()
        worker.counters.add("transfer_fallbacks_total", 0)
        for name, bounds in _HISTOGRAMS.items():
            worker.counters.declare(name, bounds)
        for retry_step in ev.RetryStep:
            worker.counters.add("transfer_pulled_again_total", 0, rung=retry_step.value)

    def add_peer(self, ref: PeerRef, source: Source, terms: PeerTerms | None) -> None:
        """Record a new link. terms: None if the peer's blocks are ours, one for one."""
        self._sources[ref] = source
        if terms is not None:
            self._terms[ref] = terms
            converted = terms.plan.describe() or "nothing"
            text = "KV from worker %s (model %s): converting %s"
            logger.info(text, source.worker_id, terms.model_fingerprint, converted)

    def terms_of(self, ref: PeerRef) -> PeerTerms:
        """Return the terms of a link; those between equal sides before it is up, or if nothing differs."""
        return self._terms.get(ref) or PeerTerms(self._own_plan, self._worker.model_fingerprint, None)

    def note_received(self, report: TransferReport) -> None:
        """Count the times and the bytes of a fetch whose KV is taken."""
        seconds = report.exposed_seconds + report.hidden_seconds
        values = (seconds, report.exposed_seconds, float(report.num_bytes))
        for (name, bounds), value in zip(_HISTOGRAMS.items(), values, strict=True):
            self._worker.counters.observe(name, bounds, value)

    def remove_peer(self, ref: PeerRef) -> Source | None:
        """Remove a link; return where the peer was read."""
        self._terms.pop(ref, None)
        return self._sources.pop(ref, None)

    def choose_source(self, ref: PeerRef, provisional: Source, chosen: Source) -> bool:
        """Read a peer from ``chosen``, if it is still read from ``provisional``. Return False if that link is gone."""
        source = self._sources.get(ref)
        if source == provisional:
            self._sources[ref] = chosen
        # Another link to the same peer may be up by now, with sources of its own.
        return source is not None and source.token == chosen.token

    def retries(self, incoming: IncomingTransfer) -> tuple[ev.RetryStep, ...]:
        """Return how a failed read can be retried, best first; not at all if the link is gone. Sets ``other``."""
        source = self._sources.get(incoming.ref)
        failed = incoming.source
        if failed is None or source is None or source.token != failed.token:
            return ()
        incoming.other = self.alternatives.beside(failed)
        return (ev.RetryStep.SAME_TRANSPORT,) if incoming.other is None else tuple(ev.RetryStep)

    def order(self, incoming: IncomingTransfer, action: ev.FetchOrder) -> None:
        """Post a job, or stop those that are posted."""
        match action:
            case ev.PullBlocks():
                job = incoming.job(action, incoming.source or self._sources[incoming.ref])
                if read := self._ports.pull(job):  # it is reported within the call
                    self._later.append(read)
            case ev.RetryStep():
                failed = incoming.read_again(action)
                if failed is not None:
                    next_source = self.alternatives.note_failure(failed)
                    if incoming.ref in self._sources:
                        self._sources[incoming.ref] = next_source
                self._worker.counters.add("transfer_pulled_again_total", rung=action.value)
                is_fallback = action is ev.RetryStep.OTHER_TRANSPORT
                self._worker.counters.add("transfer_fallbacks_total", is_fallback)
            case ev.CommitBlocks():
                states = incoming.received_states()
                commit = CommitJob(incoming.key, action.block_ids, incoming.read, states)
                self._later.append(partial(self._ports.commit, commit))  # it may be reported within the call
            case ev.StopReads():
                self._later.append(incoming.read.stop)

    def report(self, incoming: IncomingTransfer, action: ev.FetchNotice, now: float) -> None:
        """Send a message to the sender, or an event to the scheduler."""
        wire = (incoming.transfer_id, incoming.attempt)
        ending = incoming.fetch.ending
        match action:
            case ev.FetchNotice.RELEASE:
                # After this worker's core is woken: the sender's core may take the processor.
                self._later.append(partial(self._ports.post, incoming.ref, msg.ReleaseLease(*wire)))
                return
            case ev.FetchNotice.CANCEL:
                self._ports.post(incoming.ref, msg.CancelFetch(*wire))
                return
            case ev.FetchNotice.PUBLISHED:
                self.events.append(Published(incoming.key, incoming.announced.terms.kv_fingerprint))
            case ev.FetchNotice.FAILED if ending is not None:
                if ending.kind != ev.NOT_NEEDED:
                    self._worker.counters.add("transfer_failures_total", kind=ending.kind)
                self.events.append(Failed(incoming.key, ending.kind, ending.message))
            case ev.FetchNotice.DRAINED:
                self.events.append(Drained(incoming.key))
            case ev.FetchNotice.RECEIVED:
                if incoming.source is not None:
                    self.alternatives.note_success(incoming.source)
                self.arrival_estimates.on_arrival(incoming.key, now)
                self._completions.add_received(incoming.key)
        self._later.append(self._worker.wake)
