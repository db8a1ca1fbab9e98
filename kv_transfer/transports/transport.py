"""The seam below the data half: how bytes of lent blocks reach another process. Two roles, few verbs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.connector import KVMemory
from kv_transfer.protocol.reads import LeaseName, Read, ReadRequest, Source


class SenderTransport(Protocol):
    """Lends blocks of this process's pool. Thread-safe."""

    address: str

    def start(self, memory: KVMemory) -> None:
        """The pool that every lease lends from; called once, before ``publish``."""

    def publish(self, name: LeaseName, block_ids: Sequence[int]) -> bytes | None:
        """Append ``block_ids`` to the blocks that may be read under this lease.

        Returns what a receiver reads them by without asking (at most MAX_GRANT_BYTES, see ``RangeGrant``), or None.
        """

    def release(self, name: LeaseName) -> None:
        """Start no more reads of this lease, end running ones; ``on_idle(name)`` once per call when none runs."""

    def close(self) -> None:
        """End all reads and stop every thread. Idempotent."""


class ReceiverTransport(Protocol):
    """Reads blocks of other processes' pools. Thread-safe: one thread at a time fetches from one source."""

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Fill ``views[i]`` with the block ``request.first_block + i``; terminal when it returns or raises.

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
