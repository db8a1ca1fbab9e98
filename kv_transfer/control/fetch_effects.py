"""Carries out what the state machine of a fetch asks for."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from engine.connector import Drained, Failed, Published, TransferEvent
from kv_transfer.control.arrival_estimates import ArrivalEstimates
from kv_transfer.control.incoming_transfer import IncomingTransfer
from kv_transfer.control.peer_sources import PeerSources
from kv_transfer.counters import Completions, Counters
from kv_transfer.links.link import PeerRef
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import messages as msg
from kv_transfer.protocol.events import NOT_NEEDED, RetryStep
from kv_transfer.protocol.handshake import PeerTarget, Session
from kv_transfer.protocol.orders import CommitJob, PullJob
from kv_transfer.protocol.reads import Source
from kv_transfer.transports.choosing import Alternatives

Later = list[Callable[[], None]]
"""Calls to make once the lock is released; see ``Transfers``."""


@dataclass(frozen=True)
class FetchPorts:
    """The calls by which the effects leave; from any thread, none blocks."""

    dial: Callable[[PeerTarget, msg.Message], None]
    post: Callable[[PeerRef, msg.Message], None]
    pull: Callable[[PullJob], None]
    commit: Callable[[CommitJob], None]
    wake_core: Callable[[], None]
    choose: Callable[[Session, Callable[[Source, Source], bool]], Source]
    alternatives: Alternatives


class FetchEffects:
    """Owns the events and the expected arrivals that the scheduler asks for. Used under the lock of ``FetchTransfers``.

    block_bytes: of this worker's blocks. events: for the scheduler, until it takes them.
    """

    def __init__(
        self,
        ports: FetchPorts,
        block_bytes: int,
        peers: PeerSources,
        counters: Counters,
        completions: Completions,
    ) -> None:
        self._ports = ports
        self._block_bytes = block_bytes
        self._peers = peers
        self._counters = counters
        self._completions = completions
        self.events: list[TransferEvent] = []
        self.arrival_estimates = ArrivalEstimates()
        counters.add("transfer_fallbacks_total", 0)
        for retry_step in RetryStep:
            counters.add("transfer_pulled_again_total", 0, rung=retry_step.value)

    def order(self, incoming: IncomingTransfer, action: ev.FetchOrder, later: Later) -> None:
        """Post a job, or stop those that are posted."""
        match action:
            case ev.PullBlocks() | ev.ReadAhead():
                incoming.source = incoming.source or self._peers.source_of(incoming.ref)
                job = incoming.job(action, self._block_bytes)
                if job.is_here:  # it is verified, and reported, within the call
                    later.append(partial(self._ports.pull, job))
                else:
                    self._ports.pull(job)
            case ev.ReadAgain():
                self._read_again(incoming, action.retry_step)
            case ev.CommitBlocks():
                commit = CommitJob(incoming.key, action.block_ids, incoming.read)
                later.append(partial(self._ports.commit, commit))  # it may be reported within the call
            case ev.StopReads():
                later.append(incoming.read.stop)

    def report(self, incoming: IncomingTransfer, action: ev.FetchNotice, now: float, later: Later) -> None:
        """Send a message to the sender, or an event to the scheduler."""
        wire = (incoming.transfer_id, incoming.attempt)
        ending = incoming.fetch.ending
        match action:
            case ev.FetchNotice.RELEASE:
                # After this worker's core is woken: the sender's core may take the processor.
                later.append(partial(self._ports.post, incoming.ref, msg.ReleaseLease(*wire)))
                return
            case ev.FetchNotice.CANCEL:
                self._ports.post(incoming.ref, msg.CancelFetch(*wire))
                return
            case ev.FetchNotice.PUBLISHED:
                terms = self._peers.terms_of(incoming.ref)
                self.events.append(Published(incoming.key, None if terms is None else terms.kv_fingerprint))
            case ev.FetchNotice.FAILED if ending is not None:
                if ending.kind != NOT_NEEDED:
                    self._counters.add("transfer_failures_total", kind=ending.kind)
                self.events.append(Failed(incoming.key, ending.kind, ending.message))
            case ev.FetchNotice.DRAINED:
                self.events.append(Drained(incoming.key))
            case ev.FetchNotice.RECEIVED:
                if incoming.source is not None:
                    self._peers.alternatives.worked(incoming.source)
                self.arrival_estimates.arrived(incoming.key, now)
                self._completions.add_received(incoming.key)
        later.append(self._ports.wake_core)

    def _read_again(self, incoming: IncomingTransfer, retry_step: RetryStep) -> None:
        failed = incoming.read_again(retry_step)
        if failed is not None:
            self._peers.mark_failed(incoming.ref, failed)
        self._counters.add("transfer_pulled_again_total", rung=retry_step.value)
        self._counters.add("transfer_fallbacks_total", retry_step is RetryStep.OTHER_TRANSPORT)
