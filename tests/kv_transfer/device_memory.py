"""A pool on a device that every machine has: host memory behind the interface of a device."""

import weakref
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from contract.layout import KVLayout
from engine.connector import Computed
from engine.kv_cache.memory import PinnedParts, PinnedRow, StagedKVMemory
from kv_transfer.native.folding import fold_words
from tests.kv_transfer.builders import LAYOUT

Numbers = npt.NDArray[np.uint64]
UNTOUCHED = 0x5A


class _Recorded:
    """The end of a copy to the host, which is recorded when it is waited for."""

    def __init__(self, log: list[tuple[str, int]], first: int) -> None:
        self._log, self._first = log, first

    def synchronize(self) -> None:
        self._log.append(("read", self._first))


class _Launched:
    """Operations of a slow device, which it carries out when they are waited for, and not before."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def synchronize(self) -> None:
        if self._work is not None:
            self._work()
            self._work = None

    def query(self) -> bool:
        return self._work is None


class FakeDevice(StagedKVMemory):
    """Counts the blocks whose bytes pass through host memory, and computes the sums of digests by the host's function.

    num_out, num_in: copies of blocks, or parts of them, to the host, and from there.
    num_folded: blocks, or parts of them, that were added up on the device. committed: blocks, in order. log: the copies that
    were begun, and those that were waited for, with their first blocks, and "launched" operations. rows_in_use: of host
    memory. areas: the areas of this device for blocks of a peer, which count for themselves.
    """

    def __init__(
        self, layout: KVLayout = LAYOUT, num_blocks: int = 64, device: torch.device | None = None
    ) -> None:
        super().__init__(layout, num_blocks, device or torch.device("cpu"))
        self.rows = self.pool.view(num_blocks, -1).view(torch.uint8)
        self.rows[1:] = UNTOUCHED
        self.num_out = self.num_in = self.num_folded = 0
        self.committed = list[int]()
        self.log = list[tuple[str, int]]()
        self.rows_in_use: weakref.WeakSet[PinnedRow] = weakref.WeakSet()
        self.areas: list[FakeDevice] = []

    @property
    def can_fold(self) -> bool:
        return True

    def fold(self, block_ids: Sequence[int], start: int, end: int, seeds: Numbers) -> Numbers:
        self.num_folded += len(block_ids)
        sums = np.zeros((2, len(block_ids)), np.uint64)
        begins = [self.rows[self._check(block_id)].data_ptr() + start for block_id in block_ids]
        fold_words()(sums, np.array(begins, np.uint64), seeds, start // 8, (end - start) // 8)
        return sums

    def begin_reading(self, block_ids: Sequence[int], start: int, end: int) -> PinnedParts:
        self.num_out += len(block_ids)
        first = int(block_ids[0])
        self.log.append(("reading", first))
        copied = super().begin_reading(block_ids, start, end)
        return PinnedParts(copied._rows, _Recorded(self.log, first))

    def host_rows(self, count: int, num_bytes: int) -> list[PinnedRow]:
        rows = super().host_rows(count, num_bytes)
        self.rows_in_use.update(rows)
        return rows

    def write_rows(self, block_ids: Sequence[int], start: int, rows: Sequence[PinnedRow]) -> None:
        self.num_in += len(block_ids)
        self.log.append(("writing", block_ids[0]))
        super().write_rows(block_ids, start, rows)

    def landing_area(self, layout: KVLayout, num_blocks: int) -> "FakeDevice":
        area = FakeDevice(layout, num_blocks)
        self.areas.append(area)
        return area

    def launch(self, work: Callable[[], None]) -> Computed:
        self.log.append(("launched", 0))
        return _Launched(work)

    def wait_until_unused(self) -> None:
        self.log.append(("unused", 0))
        super().wait_until_unused()

    def commit(self, block_ids: list[int]) -> None:
        super().commit(block_ids)
        self.committed.extend(block_ids)

    def fill(self, block_id: int, content: bytes) -> None:
        """Have the device compute a block: repetitions of ``content``."""
        size = self.layout.block_bytes
        filled = (content * (size // len(content) + 1))[:size]
        self.rows[block_id] = torch.frombuffer(bytearray(filled), dtype=torch.uint8)

    @property
    def num_through_host(self) -> int:
        """Copies between this device and the host, those of its areas included."""
        return self.num_out + self.num_in + sum(area.num_through_host for area in self.areas)

    def touched(self) -> set[int]:
        """Return the blocks in which something was written."""
        return {block for block in range(1, self.num_blocks) if bool((self.rows[block] != UNTOUCHED).any())}
