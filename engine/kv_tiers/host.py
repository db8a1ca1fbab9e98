"""The tier in host memory: one piece of memory, divided into slots, and the thread that copies."""

import mmap
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from contract.errors import SettingError
from engine.connector import KVMemory
from engine.kv_tiers.storage import (
    WHOLE,
    BlockCopy,
    GroupPlace,
    digest_of,
    has_states,
    load_blocks,
    read_blocks,
    settle_thread,
    storage_name,
)


class HostTier:
    """Fulfils ``TierStorage`` with host memory. Raises SettingError if not one block fits.

    num_bytes: the most that the slots of all ranks and groups may have; each rank has an equal part. free_bytes: the host's
    free memory, which must have room for them. memory: the blocks of ``group``.
    """

    kind = "host"
    found = ()
    outlives_engine = False
    is_off = False
    has_orders = False

    def __init__(
        self,
        memory: KVMemory,
        num_bytes: int,
        free_bytes: int,
        num_ranks: int = 1,
        group: GroupPlace = WHOLE,
    ) -> None:
        self.name = storage_name(self.kind, group.number)
        self.group = group.number
        self._group_name = group.name
        self.slot_bytes = memory.layout.block_bytes
        own_bytes = int(num_bytes * group.share)
        self.num_slots = own_bytes // num_ranks // self.slot_bytes
        if self.num_slots < 1:
            part = (
                ""
                if group == WHOLE
                else f", of which {own_bytes} are for blocks of {group.name or 'the first group'}"
            )
            raise SettingError(
                f"host_kv_bytes is {num_bytes} bytes{part}, and one block has {self.slot_bytes * num_ranks}; raise it, or"
                " set it to 0",
                param="host_kv_bytes",
            )
        if num_bytes > free_bytes:
            raise SettingError(
                f"host_kv_bytes is {num_bytes} bytes, and {free_bytes} bytes of the host's memory are free; lower it",
                param="host_kv_bytes",
            )
        self._memory = memory
        self._bytes = mmap.mmap(-1, self.num_slots * self.slot_bytes)
        # The pages come with the first store, in the thread that copies; few large ones cost less time than many small.
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._bytes.madvise(mmap.MADV_HUGEPAGE)
        self._slots = np.frombuffer(self._bytes, np.uint8).reshape(self.num_slots, self.slot_bytes)
        self._digests = [0] * self.num_slots
        self._thread = ThreadPoolExecutor(1, "kv-host-tier")

    def store(self, copies: Sequence[BlockCopy]) -> "Future[int]":
        """See TierStorage."""
        return self._thread.submit(self._store, copies)

    def load(self, copies: Sequence[BlockCopy]) -> "Future[int]":
        """See TierStorage."""
        return self._thread.submit(self._load, copies)

    def slot_view(self, slot: int) -> memoryview:
        """Return the bytes of a slot."""
        view: memoryview = self._slots[slot].data
        return view

    def forget(self, slots: Sequence[int]) -> None:
        """Do nothing: the memory goes with the engine."""

    def restart(self, model: str | None) -> None:
        """Do nothing; see ``forget``."""

    def settle(self, timeout_seconds: float | None = None) -> bool:
        """See TierStorage."""
        return settle_thread(self._thread, timeout_seconds)

    def close(self) -> None:
        """See TierStorage; the memory goes when the last view does."""
        self._thread.shutdown(cancel_futures=True)

    def _store(self, copies: Sequence[BlockCopy]) -> int:
        if not has_states(self._memory, copies):
            return 0
        for copy, view in read_blocks(self._memory, copies):
            np.copyto(self._slots[copy.slot], np.frombuffer(view, np.uint8))
            self._digests[copy.slot] = digest_of(self.slot_view(copy.slot), copy.block_hash, self._group_name)
        return len(copies)

    def _load(self, copies: Sequence[BlockCopy]) -> int:
        def fill(views: Sequence[memoryview]) -> int:
            for num_filled, (copy, view) in enumerate(zip(copies, views, strict=True)):
                np.copyto(np.frombuffer(view, np.uint8), self._slots[copy.slot])
                # Of the copy, so that it covers the way from the pool and back.
                if digest_of(view, copy.block_hash, self._group_name) != self._digests[copy.slot]:
                    return num_filled
            return len(copies)

        return load_blocks(self._memory, copies, fill)
