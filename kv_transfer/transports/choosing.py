"""Which transport a peer is read over, and the receiver that goes by it.

The best transport that both sides can do is chosen when a link comes up. One that may fail though both can do it
(``shm``: the peer may be on another machine) is tried for real first, in a thread of its own, because the I/O thread
must not wait; reads from that peer wait for the outcome. The next one in order is the way out.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from msgspec.structs import replace

from contract.errors import KvbatonError, TransferError
from kv_transfer.counters import Counters
from kv_transfer.protocol.handshake import Session
from kv_transfer.protocol.orders import PullJob
from kv_transfer.protocol.reads import PeerSilentError, Read, ReadRequest, Source
from kv_transfer.transports.alternatives import Alternatives
from kv_transfer.transports.transport import ReceiverTransport

logger = logging.getLogger(__name__)


@runtime_checkable
class Probing(Protocol):
    """A receiver that can find out whether a source can be read, and keeps what it opened for that."""

    def probe(self, source: Source, read: Read) -> None:
        """Raise what a ``fetch`` would."""


@dataclass
class _Probe:
    """A choice that is being made: ``jobs`` wait for it. told: see ``Chooser.choose``."""

    candidates: list[Source]
    told: Callable[[Source, Source], bool]
    read: Read = field(default_factory=Read)
    jobs: list[PullJob] = field(default_factory=list)
    thread: threading.Thread | None = None


class Chooser:
    """Owns one receiver per transport, in order of preference. A ``ReceiverTransport`` itself. Thread-safe.

    alternatives: what the peer of a link can be read over besides what was chosen.
    """

    def __init__(self, receivers: Mapping[str, ReceiverTransport], counters: Counters) -> None:
        self._receivers = dict(receivers)
        self._counters = counters
        self.alternatives = Alternatives(counters)
        self._lock = threading.Lock()
        self._probes: dict[Source, _Probe] = {}
        self._chosen: dict[Source, Source] = {}
        self._is_closed = False

    def add(self, receivers: Mapping[str, ReceiverTransport]) -> None:
        """Receivers that could not be made before; called before anything is chosen."""
        self._receivers.update(receivers)

    def attach(self, post: Callable[[PullJob], None]) -> None:
        """Say who carries jobs out, without blocking; called once, before anything is chosen."""
        self._post = post

    def choose(self, session: Session, told: Callable[[Source, Source], bool]) -> Source:
        """Where the peer of a new link is read. Does not block.

        The answer may be provisional: then ``told(provisional, chosen)`` follows in another thread, and is False when
        nobody wants the source any more. Jobs with a provisional source are fine; they wait.
        """
        offers = {offer.transport: offer for offer in session.offers}
        candidates = [
            Source(
                session.worker_id,
                session.boot_id,
                offers[name].address,
                session.token,
                name,
                offers[name].other_addresses,
            )
            for name in self._receivers
            if name in offers
        ]
        if not candidates:
            raise TransferError(f"worker {session.worker_id} lends over no transport that this one reads")
        self.alternatives.begin(candidates)
        first = candidates[0]
        if len(candidates) == 1 or not isinstance(self._receivers[first.transport], Probing):
            names = ", ".join(offers)
            self._count(first, "only", f"of what it offers ({names}) this worker can do nothing better")
            return first
        self._start_probe(first, _Probe(candidates, told))
        return first

    def pull(self, job: PullJob) -> None:
        """Post a job, when it is known over which transport."""
        with self._lock:
            probe = self._probes.get(job.source)
            if probe is not None:
                probe.jobs.append(job)
                return
            chosen = self._chosen.get(job.source)
        self._post(job if chosen is None else replace(job, source=chosen))

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """By the source's transport."""
        self._receivers[source.transport].fetch(source, request, views, read)

    def forget(self, source: Source) -> None:
        """Every source of the same link, by its transport; a probe ends."""
        with self._lock:
            probe = self._probes.get(source)
            self._chosen.pop(source, None)
        if probe is not None:
            probe.read.stop()
        for each in self.alternatives.end(source):
            self._receivers[each.transport].forget(each)

    def close(self) -> None:
        """Stop probes and close every receiver. Idempotent."""
        with self._lock:
            self._is_closed = True
            probes = list(self._probes.values())
        for probe in probes:
            probe.read.stop()
        for receiver in self._receivers.values():
            receiver.close()
        for probe in probes:
            if probe.thread is not None:
                probe.thread.join()

    def _start_probe(self, first: Source, probe: _Probe) -> None:
        name = f"kv-probe-{first.worker_id}"
        probe.thread = threading.Thread(target=self._probe, args=(first, probe), name=name, daemon=True)
        with self._lock:
            if self._is_closed:
                return
            probe.thread.start()  # it needs the lock to end
            self._probes[first] = probe

    def _probe(self, first: Source, probe: _Probe) -> None:
        chosen, why_not = self._first_that_works(probe)
        if not probe.read.is_stopped:
            self._count(chosen, "fallback" if why_not else "probed", why_not or "it was tried and works")
        with self._lock:
            del self._probes[first]
            if chosen != first:
                self._chosen[first] = chosen
            for job in probe.jobs:
                self._post(replace(job, source=chosen))
        is_wanted = probe.told(first, chosen)
        with self._lock:
            self._chosen.pop(first, None)
        if chosen != first:
            self._receivers[first.transport].forget(first)
        if not is_wanted:
            self._receivers[chosen.transport].forget(chosen)

    def _first_that_works(self, probe: _Probe) -> tuple[Source, str]:
        """The choice, and why it is not the first candidate (else empty). The last is taken untried."""
        why_not: list[str] = []
        for candidate in probe.candidates[:-1]:
            receiver = self._receivers[candidate.transport]
            try:
                if isinstance(receiver, Probing):
                    receiver.probe(candidate, probe.read)
            except KvbatonError as error:
                why_not.append(f"{candidate.transport} failed: {error.message}")
                self.alternatives.rule_out(candidate)
                if isinstance(error, PeerSilentError):  # each further try could take as long, and reads wait
                    break
                continue
            except Exception as error:  # the boundary of a trial: reads wait for its end
                logger.exception("trying worker %s over %s failed", candidate.worker_id, candidate.transport)
                why_not.append(f"{candidate.transport} failed: {error!r}")
                self.alternatives.rule_out(candidate)
                continue
            return candidate, "; ".join(why_not)
        return probe.candidates[-1], "; ".join(why_not)

    def _count(self, source: Source, reason: str, why: str) -> None:
        logger.info("worker %s is read over %s: %s", source.worker_id, source.transport, why)
        self._counters.add("transfer_transport_chosen_total", transport=source.transport, reason=reason)
