"""Leases whose end a reader in another process can see: each holds a slot in a shared table of generations.

One counter per lease, not per block: two leases may lend the same block (prompts that begin alike), and the end of one
must not fail the readers of the other. A lease's slot is counted up when the lease ends, before anybody is told that
its blocks may be used for something else; so an unchanged generation after the last byte proves that every byte was
read under the lease. Only then is the slot given to another lease.
"""

import fcntl
import mmap
import os
import secrets
import threading
from collections.abc import Callable

from contract.errors import TransferError
from kv_transfer.transport import LeaseName
from kv_transfer.transports.shm_wire import NUM_SLOTS

SLOT_BYTES = 8
_F_SEAL_FUTURE_WRITE = 0x10
"""Linux: no new writable mapping of the file and no write() to it, for anybody; what is mapped stays writable."""


def seal(memfd: int) -> None:
    """From now on nobody can resize the file, and nobody but who has mapped it already can write to it.

    Raises OSError where the file was made without sealing, or the system cannot do it.
    """
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE)


def reopen_read_only(memfd: int) -> int:
    """A descriptor of the same file that cannot write."""
    return os.open(f"/proc/self/fd/{memfd}", os.O_RDONLY | os.O_CLOEXEC)


class GenerationTable:
    """Owns the table: mapped writable here, and ``descriptor``, which others may map read-only."""

    def __init__(self) -> None:
        memfd = os.memfd_create("kvbaton-generations", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(memfd, NUM_SLOTS * SLOT_BYTES)
            self._map = mmap.mmap(memfd, NUM_SLOTS * SLOT_BYTES)
            seal(memfd)
            self.descriptor = reopen_read_only(memfd)
        finally:
            os.close(memfd)
        self._slots = memoryview(self._map).cast("Q")
        self.nonce = secrets.randbits(64)
        self._slots[0] = self.nonce

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
        self._table, self._on_idle = table, on_idle
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
