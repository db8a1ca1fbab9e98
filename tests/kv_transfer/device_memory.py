"""A pool on a device that every machine has: host memory behind the interface of a device."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from contract.layout import KVLayout
from engine.kv_cache.memory import StagedKVMemory
from kv_transfer.native.folding import fold_words
from tests.kv_transfer.builders import LAYOUT

Numbers = npt.NDArray[np.uint64]
UNTOUCHED = 0x5A


class FakeDevice(StagedKVMemory):
    """Counts the blocks whose bytes pass through host memory, and computes the sums of digests by the host's function.

    num_out, num_in: copies of blocks, or parts of them, to the host, and blocks that are to be copied from there.
    num_folded: blocks, or parts of them, that were added up on the device. committed: blocks, in order.
    """

    def __init__(
        self, layout: KVLayout = LAYOUT, num_blocks: int = 64, device: torch.device | None = None
    ) -> None:
        super().__init__(layout, num_blocks, device or torch.device("cpu"))
        self.rows = self.pool.view(num_blocks, -1).view(torch.uint8)
        self.rows[1:] = UNTOUCHED
        self.num_out = self.num_in = self.num_folded = 0
        self.committed = list[int]()

    @property
    def can_fold(self) -> bool:
        return True

    def fold(self, block_ids: Sequence[int], start: int, end: int, seeds: Numbers) -> Numbers:
        self.num_folded += len(block_ids)
        sums = np.zeros((2, len(block_ids)), np.uint64)
        begins = [self.rows[self._check(block_id)].data_ptr() + start for block_id in block_ids]
        fold_words()(sums, np.array(begins, np.uint64), seeds, start // 8, (end - start) // 8)
        return sums

    def read_parts(self, block_ids: Sequence[int], start: int, end: int) -> list[memoryview]:
        self.num_out += len(block_ids)
        return super().read_parts(block_ids, start, end)

    def write_view(self, block_id: int) -> memoryview:
        self.num_in += block_id not in self._staged
        return super().write_view(block_id)

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
        return self.num_out + self.num_in

    def touched(self) -> set[int]:
        """Return the blocks in which something was written."""
        return {block for block in range(1, self.num_blocks) if bool((self.rows[block] != UNTOUCHED).any())}
