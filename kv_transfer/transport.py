"""The seam below the data half: how bytes of lent blocks reach another process. Two roles, few verbs.

A *lease* is a list of pool blocks lent under (transfer id, attempt, lease token). Reads name blocks by their index
in that list, so nobody can ask for a block outside it. A read counts only when the lease was valid after its last byte.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from contract.errors import TransferError
from engine.connector import KVMemory

MAX_PIECE_BYTES = 4 * 2**20
MAX_PIECE_BLOCKS = 64


class StaleLeaseError(TransferError):
    """The lease is over or was never given: nothing of the read may be used."""


class ReadStoppedError(TransferError):
    """The read was told to stop, and is terminal."""


class LeaseName(msgspec.Struct, frozen=True):
    """Which lease: a transfer, its attempt, and a token that no other lease ever had."""

    transfer_id: str
    attempt: int
    lease: str


class ReadRequest(msgspec.Struct, frozen=True):
    """The blocks ``indices`` of a lease, relative to the transfer."""

    name: LeaseName
    indices: list[int]

    def pieces(self, block_bytes: int) -> Iterator[tuple[int, "ReadRequest"]]:
        """(offset into ``indices``, request) of at most MAX_PIECE_BYTES (at least one block) each."""
        step = max(1, min(MAX_PIECE_BLOCKS, MAX_PIECE_BYTES // block_bytes))
        for start in range(0, len(self.indices), step):
            yield start, ReadRequest(self.name, self.indices[start : start + step])


@dataclass(frozen=True)
class Source:
    """Where a peer's blocks can be read, as agreed on the control link.

    token: proves the link to the peer's sender. transport: the name of the one that was chosen; address is its own.
    """

    worker_id: str
    boot_id: str
    address: str
    token: str
    transport: str = "tcp"


class Read:
    """One fetch's reads, which any thread may stop. Once stopped it stays stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._interrupt: Callable[[], None] | None = None
        self.is_stopped = False

    def stop(self) -> None:
        """Make the read terminal soon. Does not block."""
        with self._lock:
            self.is_stopped = True
            if self._interrupt is not None:
                self._interrupt()

    def check(self) -> None:
        """Raise ReadStoppedError after ``stop``."""
        if self.is_stopped:
            raise ReadStoppedError("the read was stopped")

    @contextmanager
    def interruptible(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """Within, ``stop`` calls ``interrupt`` (which must not block). Raises ReadStoppedError if stopped before."""
        with self._lock:
            self.check()
            self._interrupt = interrupt
        try:
            yield
        finally:
            with self._lock:
                self._interrupt = None


class SenderTransport(Protocol):
    """Lends blocks of this process's pool. Thread-safe."""

    address: str

    def start(self, memory: KVMemory) -> None:
        """The pool that every lease lends from; called once, before ``publish``."""

    def publish(self, name: LeaseName, block_ids: Sequence[int]) -> None:
        """Append ``block_ids`` to the blocks that may be read under this lease."""

    def release(self, name: LeaseName) -> None:
        """Start no more reads of this lease, end running ones; ``on_idle(name)`` once per call when none runs."""

    def close(self) -> None:
        """End all reads and stop every thread. Idempotent."""


class ReceiverTransport(Protocol):
    """Reads blocks of other processes' pools. Thread-safe: one thread at a time fetches from one source."""

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Fill ``views[i]`` with the block ``request.indices[i]``; terminal when it returns or raises.

        Raises ReadStoppedError after ``read.stop()``, StaleLeaseError when the lease is over, TransferError else.
        """

    def forget(self, source: Source) -> None:
        """The link to this source is gone: keep nothing of it. A read that runs ends first, or fails."""

    def close(self) -> None:
        """Close every connection; a read that runs fails. Idempotent."""


@dataclass(frozen=True)
class Transport:
    """Both roles of one transport."""

    sender: SenderTransport
    receiver: ReceiverTransport
