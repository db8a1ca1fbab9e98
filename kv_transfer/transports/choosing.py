"""The choice of the transport that each peer is read over, and of another one after failures.

The best transport that both sides support is chosen when a link comes up. All but the last one may fail although both
support them (``shm``: the peer may be on another machine), and are probed first, in a thread of its own because the I/O
thread must not wait; reads from that peer wait for the outcome. How fast a transport is may depend on what its library
finds between the two workers (``nixl``: CUDA IPC, RDMA, or TCP in disguise). Then its probe measures, so do those of the
transports behind it, and the fastest is chosen. If a probe or several transfers in a row fail, the next transport is used.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from contract.errors import InternalError, KvbatonError, TransferError, UnavailableError
from kv_transfer.counters import Counters
from kv_transfer.protocol.handshake import Session
from kv_transfer.protocol.orders import PullJob
from kv_transfer.protocol.reads import PeerSilentError, Read, ReadRequest, Source
from kv_transfer.transports.transport import ProbingReceiver, ReceiverTraits, fetch_first

logger = logging.getLogger(__name__)
PostPull = Callable[[PullJob], Callable[[], None] | None]
MAX_FAILED_IN_A_ROW = 2
"""After so many failed transfers in a row over a transport, the link is read over the next one."""


class ReadsByTransport:
    """Reads each source by the receiver of its transport. Base of ``Chooser``, which sets the receivers."""

    def __init__(self) -> None:
        self._receivers: Mapping[str, ProbingReceiver] = {}
        self.traits = ReceiverTraits(
            fetch_first=lambda source, *read: fetch_first(self._receivers[source.transport], source, *read),
            ask=lambda source, requests: self._traits_for(source).ask(source, requests),
            is_at_hand=lambda source: self._traits_for(source).is_at_hand(source),
            is_on_our_device=lambda source: self._traits_for(source).is_on_our_device(source),
        )

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Fetch by the source's transport."""
        self._receivers[source.transport].fetch(source, request, views, read)

    def _traits_for(self, source: Source) -> ReceiverTraits:
        return self._receivers[source.transport].traits


@dataclass
class _Sources:
    """One link's sources, best first, and those that were given up. num_failed: transfers in a row, by transport."""

    usable: list[Source]
    given_up: list[Source] = field(default_factory=list)
    num_failed: dict[str, int] = field(default_factory=dict)

    def give_up(self, source: Source) -> None:
        self.usable.remove(source)
        self.given_up.append(source)


class Alternatives:
    """Owns the sources of every link, by the token that they share; other links have one source. Thread-safe."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._lock = threading.Lock()
        self._links: dict[str, _Sources] = {}

    def begin(self, sources: Sequence[Source]) -> None:
        """Register a new link, which can be read over all of these, best first."""
        with self._lock:
            self._links[sources[0].token] = _Sources(list(sources))

    def rule_out(self, source: Source) -> None:
        """Give a source up: its probe failed."""
        with self._lock:
            self._link(source).give_up(source)

    def prefer(self, source: Source) -> None:
        """Put a source before the others of its link: it is the fastest."""
        with self._lock:
            link = self._link(source)
            if source in link.usable:
                link.usable.remove(source)
                link.usable.insert(0, source)

    def best(self, source: Source) -> Source:
        """Return the best source of the same link."""
        with self._lock:
            return self._link(source).usable[0]

    def beside(self, source: Source) -> Source | None:
        """Return the best other source of the same link, if any."""
        with self._lock:
            return next((other for other in self._link(source).usable if other != source), None)

    def note_failure(self, source: Source) -> Source:
        """Count a failed transfer; return the source of the link's next transfers."""
        with self._lock:
            link = self._link(source)
            num_failed = link.num_failed.get(source.transport, 0) + 1
            link.num_failed[source.transport] = min(num_failed, MAX_FAILED_IN_A_ROW)
            is_spare = source in link.usable and len(link.usable) > 1
            if is_spare and num_failed >= MAX_FAILED_IN_A_ROW:
                self._leave(link, source)
            return link.usable[0]

    def note_success(self, source: Source) -> None:
        """Reset the failures in a row: a whole transfer was read from this source."""
        with self._lock:
            self._link(source).num_failed.pop(source.transport, None)

    def end(self, source: Source) -> list[Source]:
        """Remove a link that is gone; return all its sources."""
        with self._lock:
            link = self._links.pop(source.token, _Sources([source]))
        return link.usable + link.given_up

    def debug_state(self) -> list[dict[str, Any]]:
        """Return the usable and the given-up transports of every link."""
        with self._lock:
            return [
                {
                    "worker_id": (link.usable + link.given_up)[0].worker_id,
                    "transports": [source.transport for source in link.usable],
                    "left": [source.transport for source in link.given_up],
                }
                for link in self._links.values()
            ]

    def _link(self, source: Source) -> _Sources:
        return self._links.get(source.token) or _Sources([source])

    def _leave(self, link: _Sources, source: Source) -> None:
        link.give_up(source)
        self._counters.add("transfer_transport_left_total", transport=source.transport)
        logger.warning(
            "worker %s is not read over %s any more: %d transfers in a row failed; it is read over %s",
            source.worker_id,
            source.transport,
            MAX_FAILED_IN_A_ROW,
            link.usable[0].transport,
        )


@dataclass(frozen=True)
class Tried:
    """The outcome of a probe. error: None if the source can be read. bytes_per_second: see ``ProbingReceiver``."""

    error: KvbatonError | None = None
    bytes_per_second: float | None = None


@dataclass
class _Probe:
    """A choice that is being made; ``jobs``, and the calls in ``waiting``, wait for it. on_chosen: see ``Chooser.choose``.

    chosen: the outcome, from which jobs are read that name the provisional source, until ``on_chosen`` returns.
    """

    candidates: list[Source]
    on_chosen: Callable[[Source, Source], bool]
    thread: threading.Thread = field(init=False)
    read: Read = field(default_factory=Read)
    jobs: list[PullJob] = field(default_factory=list)
    waiting: list[Callable[[Source], None]] = field(default_factory=list)
    chosen: Source | None = None


class Chooser(ReadsByTransport):
    """Owns one receiver per transport, in order of preference. A ``ReceiverTransport`` itself. Thread-safe."""

    def __init__(self, counters: Counters) -> None:
        super().__init__()
        self._counters = counters
        self.alternatives = Alternatives(counters)
        self._lock = threading.Lock()
        self._probes: dict[Source, _Probe] = {}
        self._is_closed = False

    def start(self, receivers: Mapping[str, ProbingReceiver], post: PostPull) -> None:
        """Choose among these; called once, before anything is chosen. post: starts a job without blocking, as ``pull``."""
        self._receivers = receivers
        self._post = post

    def choose(self, session: Session, on_chosen: Callable[[Source, Source], bool]) -> Source:
        """Return the source that the peer of a new link is read from. Does not block.

        The answer may be provisional: then ``on_chosen(provisional, chosen)`` follows in another thread, and returns False
        if the source is not needed any more. Jobs may use a provisional source; they wait. Raises TransferError without a
        common transport, UnavailableError without a thread to probe in; no state of the link is left then.
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
                session.digest,
                session.block_bytes,
            )
            for name in self._receivers
            if name in offers
        ]
        if not candidates:
            raise TransferError(f"worker {session.worker_id} lends over no transport that this one reads")
        self.alternatives.begin(candidates)
        first = candidates[0]
        if len(candidates) == 1:
            names = ", ".join(offers)
            self._count(first, "only", f"it is the best of the transports that the worker offers ({names})")
            return first
        self._start_probe(first, _Probe(candidates, on_chosen))
        return first

    def when_chosen(self, source: Source, then: Callable[[Source], None]) -> None:
        """Call ``then`` with the source that a link is read from, when it is known: within this call or in a thread.

        source: a source of that link, provisional or not.
        """
        with self._lock:
            probe = self._probes.get(source)
            if probe is not None:
                probe.waiting.append(then)
                return
        then(self.alternatives.best(source))

    def pull(self, job: PullJob) -> Callable[[], None] | None:
        """Start a job, as soon as its transport is known. Return a call that runs it, if its caller has to make it."""
        with self._lock:
            probe = self._probes.get(job.source)
            if probe is not None:
                if probe.chosen is None:
                    probe.jobs.append(job)
                    return None
                job = replace(job, source=probe.chosen)
        return self._post(job)

    def try_out(self, source: Source, read: Read) -> Tried:
        """Probe a source by its transport."""
        try:
            return Tried(bytes_per_second=self._receivers[source.transport].probe(source, read))
        except KvbatonError as error:
            return Tried(error)
        except Exception as error:  # the boundary of a probe: reads wait for its end
            logger.exception("probing worker %s over %s failed", source.worker_id, source.transport)
            return Tried(InternalError(repr(error)))

    def forget(self, source: Source) -> None:
        """Drop every source of the same link, and end its probe."""
        with self._lock:
            probe = self._probes.get(source)
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
            probe.thread.join()

    def _start_probe(self, first: Source, probe: _Probe) -> None:
        name = f"kv-probe-{first.worker_id}"
        probe.thread = threading.Thread(target=self._probe, args=(first, probe), name=name, daemon=True)
        with self._lock:
            if self._is_closed:
                return
            try:
                probe.thread.start()  # it needs the lock to end
            except RuntimeError as error:
                self.alternatives.end(first)
                raise UnavailableError(
                    f"no thread can be started to probe worker {first.worker_id}"
                ) from error
            self._probes[first] = probe

    def _probe(self, first: Source, probe: _Probe) -> None:
        chosen, why_not = self._first_that_works(probe)
        if not probe.read.is_stopped:
            self._count(chosen, "fallback" if why_not else "probed", why_not or "its probe succeeded")
        with self._lock:
            probe.chosen = chosen
            begun = [self._post(replace(job, source=chosen)) for job in probe.jobs]
        for run in filter(None, begun):
            run()
        is_wanted = probe.on_chosen(first, chosen)
        with self._lock:
            del self._probes[first]  # nothing begins to wait from now on
        for then in probe.waiting:
            then(chosen)
        # What its probe has opened is not used.
        if chosen != first:
            self._receivers[first.transport].forget(first)
        if not is_wanted:
            self._receivers[chosen.transport].forget(chosen)

    def _first_that_works(self, probe: _Probe) -> tuple[Source, str]:
        """Return the choice, and why it is not the first candidate (else empty). The last one is taken without a probe."""
        why_not: list[str] = []
        for number, candidate in enumerate(probe.candidates[:-1]):
            tried = self.try_out(candidate, probe.read)
            if tried.error is None:
                rates = {candidate: tried.bytes_per_second or 0.0}
                if tried.bytes_per_second is not None:
                    rates |= self._measured(probe.candidates[number + 1 :], probe.read)
                return self._fastest(probe, rates, why_not)
            why_not.append(f"{candidate.transport} failed: {tried.error.message}")
            self.alternatives.rule_out(candidate)
            # Each further probe could take as long, and reads wait.
            if isinstance(tried.error, PeerSilentError):
                break
        return probe.candidates[-1], "; ".join(why_not)

    def _measured(self, candidates: Sequence[Source], read: Read) -> dict[Source, float]:
        """Return the rates of those that can be read and measure them."""
        tried = {candidate: self.try_out(candidate, read) for candidate in candidates}
        return {
            candidate: outcome.bytes_per_second
            for candidate, outcome in tried.items()
            if outcome.bytes_per_second is not None
        }

    def _fastest(
        self, probe: _Probe, rates: Mapping[Source, float], why_not: list[str]
    ) -> tuple[Source, str]:
        """Return the fastest source, and why it is not the first; the first one of ``rates`` is the best by its name."""
        first = next(iter(rates))
        chosen = max(rates, key=rates.__getitem__)
        if len(rates) > 1:
            found = ", ".join(f"{each.transport} {rate / 1e9:.3f} GB/s" for each, rate in rates.items())
            logger.info("worker %s was read by probes: %s", first.worker_id, found)
            if chosen != first:
                why_not.append(f"{first.transport} is slower ({found})")
        self.alternatives.prefer(chosen)
        for each in rates:
            if each not in (chosen, probe.candidates[0]):  # which jobs may still name
                self._receivers[each.transport].forget(each)
        return chosen, "; ".join(why_not)

    def _count(self, source: Source, reason: str, why: str) -> None:
        logger.info("worker %s is read over %s: %s", source.worker_id, source.transport, why)
        self._counters.add("transfer_transport_chosen_total", transport=source.transport, reason=reason)
