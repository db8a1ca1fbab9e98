"""The tier on a disk: files that survive the engine, and the thread that writes and reads them."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import TypeVar

from contract.block_hash import BlockHash
from engine.connector import KVMemory
from engine.kv_tiers.slab import SlabEntry, SlabHeader
from engine.kv_tiers.slab_folder import SlabFolder
from engine.kv_tiers.storage import (
    ALONE,
    WHOLE,
    BlockCopy,
    GroupPlace,
    RankPlace,
    digest_of,
    has_states,
    load_blocks,
    read_blocks,
    settle_thread,
    storage_name,
)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class DiskTier:
    """Fulfils ``TierStorage`` with files in a folder, which one engine uses at a time.

    Of several ranks, each has a folder in ``path``, and an equal part of ``num_bytes``; of several groups of layers, each
    has its share, and the further ones a folder in that one. memory: the blocks of ``group``. found: what earlier engines
    have left there. on_failure: called with the reason, once, in the tier's thread, if the disk fails; the tier is off from
    then on. Raises SettingError; see ``SlabFolder``.
    """

    kind = "disk"
    outlives_engine = True
    has_orders = False

    def __init__(
        self,
        memory: KVMemory,
        path: Path,
        num_bytes: int,
        model: str,
        place: RankPlace = ALONE,
        on_failure: Callable[[str], None] = logger.warning,
        group: GroupPlace = WHOLE,
    ) -> None:
        self.is_off = False
        self._group = group
        self._memory = memory
        self._on_failure = on_failure
        folder = path if place.num_ranks == 1 else path / f"rank-{place.rank}"
        if group.number:
            folder /= f"group-{group.number}"
        header = SlabHeader(model, memory.layout, 0, *place, group=group.name)
        self._folder = SlabFolder(folder, int(num_bytes * group.share), header)
        entries = sorted(self._folder.entries, key=lambda one: one[1].number)
        self.found: list[tuple[BlockHash, int]] = [(entry.block_hash, slot) for slot, entry in entries]
        self._digests = {slot: entry.digest for slot, entry in entries}
        self._numbers = count(entries[-1][1].number + 1 if entries else 1)
        self._thread = ThreadPoolExecutor(1, "kv-disk-tier")
        logger.info("%s has %d blocks of KV, and room for %d", folder, len(entries), self.num_slots)

    @property
    def name(self) -> str:
        """See TierStorage."""
        return storage_name(self.kind, self.group)

    @property
    def group(self) -> int:
        """See TierStorage."""
        return self._group.number

    @property
    def num_slots(self) -> int:
        """See TierStorage."""
        return self._folder.num_slots

    @property
    def slot_bytes(self) -> int:
        """See TierStorage."""
        return self._memory.layout.block_bytes

    def store(self, copies: Sequence[BlockCopy]) -> "Future[int]":
        """See TierStorage."""
        return self._thread.submit(self._unless_off, self._store, copies)

    def load(self, copies: Sequence[BlockCopy]) -> "Future[int]":
        """See TierStorage."""
        return self._thread.submit(self._unless_off, self._load, copies)

    def forget(self, slots: Sequence[int]) -> None:
        """See TierStorage."""
        self._thread.submit(self._unless_off, self._folder.clear, slots)

    def restart(self, model: str | None) -> None:
        """See TierStorage."""
        self._thread.submit(self._unless_off, self._folder.restart, model)

    def settle(self, timeout_seconds: float | None = None) -> bool:
        """See TierStorage."""
        return settle_thread(self._thread, timeout_seconds)

    def close(self) -> None:
        """See TierStorage."""
        self._thread.shutdown()  # with what waits: content that was dropped must not come back at the next start
        self._folder.close()

    def _unless_off(self, action: Callable[[_T], int | None], argument: _T) -> int:
        """Return the number of an action, if it has any; 0 if the disk fails, or has failed."""
        if self.is_off:
            return 0
        try:
            return action(argument) or 0
        except OSError as error:
            self.is_off = True
            self._on_failure(
                f"{self._folder.path}: the KV tier on this disk is off until the next start: {error}"
            )
            return 0

    def _store(self, copies: Sequence[BlockCopy]) -> int:
        if not has_states(self._memory, copies):
            return 0
        for copy, view in read_blocks(self._memory, copies):
            digest = digest_of(view, copy.block_hash, self._group.name)
            self._folder.write(copy.slot, SlabEntry(copy.block_hash, digest, next(self._numbers)), view)
            self._digests[copy.slot] = digest
        return len(copies)

    def _load(self, copies: Sequence[BlockCopy]) -> int:
        def fill(views: Sequence[memoryview]) -> int:
            for num_filled, (copy, view) in enumerate(zip(copies, views, strict=True)):
                is_there = self._folder.read_into(copy.slot, view)
                digest = digest_of(view, copy.block_hash, self._group.name)
                if not is_there or digest != self._digests[copy.slot]:
                    return num_filled
            return len(copies)

        return load_blocks(self._memory, copies, fill)
