"""Leases whose end a reader in another process can see: each holds a slot in a shared table of generations.

One counter per lease, not per block: two leases may lend the same block (prompts that begin alike), and the end of one
must not fail the readers of the other. A lease's slot is counted up when the lease ends, before anybody is told that
its blocks may be used for something else; so an unchanged generation after the last byte proves that every byte was
read under the lease. Only then is the slot given to another lease. A reader looks at the table by itself, mapped
(``shm``) or by a read of its own (``nixl``); the sender never learns of that and never waits for it.
"""

import mmap
import os
import secrets
import threading
from collections.abc import Callable

from contract.errors import TransferError
from kv_transfer.protocol.reads import LeaseName
from kv_transfer.transports.block_views import address_of
from kv_transfer.transports.sealed_files import reopen_read_only, seal

SLOT_BYTES = 8
NUM_SLOTS = 65536
"""64-bit counters in a table. Slot 0 is no lease's: what it shows proves that the right table is looked at."""
TABLE_BYTES = NUM_SLOTS * SLOT_BYTES


class GenerationTable:
    """Owns the table: mapped writable here at ``address``, and ``descriptor``, which others may map read-only.

    It begins with random numbers, so that no other memory (that of a table before it, zeros) passes for it. nonce: slot 0.
    """

    def __init__(self) -> None:
        memfd = os.memfd_create("kvbaton-generations", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(memfd, TABLE_BYTES)
            self._map = mmap.mmap(memfd, TABLE_BYTES)
            seal(memfd)
            self.descriptor = reopen_read_only(memfd)
        finally:
            os.close(memfd)
        self._map[:] = secrets.token_bytes(TABLE_BYTES)
        self._slots = memoryview(self._map).cast("Q")
        self.address = address_of(self._slots)
        self.nonce = self._slots[0]

    def generation(self, slot: int) -> int:
        """What the slot shows now."""
        return self._slots[slot]

    def end(self, slot: int) -> None:
        """Count the slot up: whoever read under the old generation can see it."""
        self._slots[slot] = (self._slots[slot] + 1) % 2**64

    def close(self) -> None:
        """Unmap it here; what others have mapped stays as it is."""
        self._slots.release()
        self._map.close()
        os.close(self.descriptor)


class SharedLeases:
    """The leases of one sender; owns their slots. Thread-safe."""

    def __init__(self, table: GenerationTable, on_idle: Callable[[LeaseName], None]) -> None:
        self._table = table
        self._on_idle = on_idle
        self._lock = threading.Lock()
        self._slots: dict[LeaseName, int] = {}
        self._free_slots = list(range(NUM_SLOTS - 1, 0, -1))

    def open(self, name: LeaseName) -> tuple[int, int]:
        """(slot, generation) by which the end of this lease can be seen; the slot is its own until then.

        Raises TransferError without a free slot.
        """
        with self._lock:
            slot = self._slots.get(name)
            if slot is None:
                if not self._free_slots:
                    raise TransferError(
                        f"{NUM_SLOTS - 1} leases are open, and no more can be; end some first"
                    )
                slot = self._slots[name] = self._free_slots.pop()
            return slot, self._table.generation(slot)

    def revoke(self, name: LeaseName) -> None:
        """End the lease for every reader, then call ``on_idle``, once for each call: nobody is waited for."""
        with self._lock:
            self._end(name)
        self._on_idle(name)

    def revoke_all(self) -> None:
        """End every lease for every reader; nobody is told."""
        with self._lock:
            for name in list(self._slots):
                self._end(name)

    def _end(self, name: LeaseName) -> None:
        slot = self._slots.pop(name, None)
        if slot is not None:
            self._table.end(slot)
            self._free_slots.append(slot)
