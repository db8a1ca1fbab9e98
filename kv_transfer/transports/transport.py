"""The interface of a transport (how the bytes of lent blocks reach another process), and all senders as one."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from engine.connector import KVMemory
from kv_transfer.protocol.messages import Offer
from kv_transfer.protocol.reads import LeaseName, Read, ReadRequest, Source
from kv_transfer.transports.leases import Sessions
from kv_transfer.transports.local import LocalHub


class SenderTransport(Protocol):
    """Lends blocks of this process's pool. Thread-safe."""

    address: str

    def start(self, memory: KVMemory) -> None:
        """Lend from this pool; called once, before ``publish``."""

    def publish(self, name: LeaseName, block_ids: Sequence[int]) -> bytes | None:
        """Append ``block_ids`` to the blocks that may be read under this lease.

        Returns a grant, by which a receiver reads them without a request (at most MAX_GRANT_BYTES, see
        ``RangeGrant``), or None.
        """

    def release(self, name: LeaseName) -> None:
        """Start no more reads of this lease and end running ones; call ``on_idle(name)`` once per call when none runs."""

    def close(self) -> None:
        """End all reads and stop every thread. Idempotent."""


@runtime_checkable
class Conditional(Protocol):
    """A sender that may turn out unusable once the pool is known. why_not_offered: None when it is usable."""

    why_not_offered: str | None


class ReceiverTransport(Protocol):
    """Reads blocks of other processes' pools. Thread-safe: one thread at a time fetches from one source."""

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Fill ``views[i]`` with the block ``request.first_block + i``; terminal when it returns or raises.

        Raises ReadStoppedError after ``read.stop()``, StaleLeaseError when the lease is over, TransferError else.
        """

    def forget(self, source: Source) -> None:
        """Drop all state of a source whose link is gone. A running read ends first, or fails."""

    def close(self) -> None:
        """Close every connection; a running read fails. Idempotent."""


@runtime_checkable
class Probing(Protocol):
    """A receiver that can test whether a source is readable, and keeps the connection that the test opened."""

    def probe(self, source: Source, read: Read) -> None:
        """Raise what a ``fetch`` would."""


@dataclass(frozen=True)
class Transport:
    """Both roles of one transport."""

    sender: SenderTransport
    receiver: ReceiverTransport


@dataclass(frozen=True)
class TransportContext:
    """The arguments that every transport is opened with.

    on_idle: see ``SenderTransport.release``; called from any thread. shm_dir: see ``TransferSettings``.
    is_auto: the transport is one of several that ``auto`` opens. on_thread_failed: called in a thread of the transport that
    ends because of a bug and serves nothing any more.
    """

    host: str
    advertise_host: str | None
    data_port: int
    boot_id: str
    read_timeout_seconds: float
    sessions: Sessions
    on_idle: Callable[[LeaseName], None]
    local: LocalHub | None = None
    shm_dir: Path | None = None
    is_auto: bool = False
    on_thread_failed: Callable[[str, BaseException], None] = lambda _thread, _error: None


class IdleTogether:
    """Calls ``on_idle`` once per release, when every sender has reported that it has no reader any more. Thread-safe."""

    def __init__(self, senders: Sequence[str], on_idle: Callable[[LeaseName], None]) -> None:
        self._on_idle = on_idle
        self._lock = threading.Lock()
        self._reported: dict[str, Counter[LeaseName]] = {sender: Counter() for sender in senders}

    def leave_out(self, sender: str) -> None:
        """Expect no report from this sender: it could not be opened."""
        del self._reported[sender]

    def report(self, sender: str, name: LeaseName) -> None:
        """Record that this sender has no reader of the lease."""
        with self._lock:
            self._reported[sender][name] += 1
            if not all(reported[name] for reported in self._reported.values()):
                return
            for reported in self._reported.values():
                reported[name] -= 1
                if not reported[name]:
                    del reported[name]
        self._on_idle(name)


class Senders:
    """Owns the senders by their transports' names, best first. Thread-safe, as they are."""

    def __init__(self, senders: Mapping[str, SenderTransport]) -> None:
        self._senders = dict(senders)

    def offers(self) -> list[Offer]:
        """Return what a peer can read over, best first."""
        reasons = self.why_not()
        return [Offer(name, sender.address) for name, sender in self._senders.items() if name not in reasons]

    def why_not(self) -> dict[str, str]:
        """Return the transports that are open but not offered, and why."""
        return {
            name: sender.why_not_offered
            for name, sender in self._senders.items()
            if isinstance(sender, Conditional) and sender.why_not_offered is not None
        }

    def start(self, memory: KVMemory) -> None:
        """Lend from this pool."""
        for sender in self._senders.values():
            sender.start(memory)

    def publish(self, name: LeaseName, block_ids: Sequence[int]) -> tuple[tuple[str, bytes], ...]:
        """Append blocks to the lease on every sender; return (transport, grant) of those that return a grant."""
        granted = [(each, sender.publish(name, block_ids)) for each, sender in self._senders.items()]
        return tuple((each, grant) for each, grant in granted if grant is not None)

    def release(self, name: LeaseName) -> None:
        """End the lease on every sender."""
        for sender in self._senders.values():
            sender.release(name)

    def close(self) -> None:
        """Close every sender."""
        for sender in self._senders.values():
            sender.close()
