"""Regions of blocks that the NIXL library reads and writes, in host memory or on a GPU."""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from contract.errors import TransferError
from engine.connector import KVMemory
from kv_transfer.protocol.reads import BlockPart
from kv_transfer.transports.block_views import BlockViews, FlatMemory, OnDevice, address_of, block_span

_END_OF_MEMORY = 2**63
ID_TYPE = np.dtype(np.int32)
"""The library counts blocks by 32 bits."""
_MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True)
class Region:
    """Blocks that lie side by side in memory."""

    address: int
    block_bytes: int
    num_blocks: int
    is_device: bool = False
    device_id: int = 0

    @property
    def num_bytes(self) -> int:
        """The size of all blocks."""
        return self.block_bytes * self.num_blocks

    @property
    def memory_type(self) -> str:
        """The library's name for this kind of memory."""
        return "VRAM" if self.is_device else "DRAM"

    def check(self) -> None:
        """Raise TransferError for numbers that cannot be memory."""
        numbers = (self.address, self.block_bytes, self.num_blocks)
        is_too_much = self.num_blocks > _MAX_BLOCKS
        if (
            is_too_much
            or min(numbers) <= 0
            or self.address + self.num_bytes >= _END_OF_MEMORY
            or self.device_id < 0
        ):
            raise TransferError(
                f"{self.num_blocks} blocks of {self.block_bytes} bytes at {self.address} are not memory"
            )

    def find(
        self, views: Sequence[memoryview], part: BlockPart | None = None
    ) -> npt.NDArray[np.int64] | None:
        """Return the blocks that the writable ``views`` are, or are this part of; None if one is not in this region."""
        if isinstance(views, BlockViews):
            is_here = views.address == self.address and views.pool.nbytes <= self.num_bytes
            is_same = views.block_bytes == self.block_bytes and views.part == part
            return views.ids if is_here and is_same else None
        (start, end) = block_span(self.block_bytes, part)
        found = list[int]()
        for view in views:
            number, offset = divmod(address_of(view) - self.address, self.block_bytes)
            if offset != start or view.nbytes != end - start or not 0 <= number < self.num_blocks:
                return None
            found.append(number)
        return np.array(found, np.int64)

    def strided_row(self, part: BlockPart | None = None) -> Any:
        """Return all blocks, or the part of each, as one row of [address, length, device, stride, count]."""
        start, end = block_span(self.block_bytes, part)
        row = (self.address + start, end - start, self.device_id, self.block_bytes, self.num_blocks)
        return np.array([row], np.uint64)

    def rows(self, part: BlockPart | None = None) -> Any:
        """Return a row of [address, length, device] for each block, or the part of it."""
        start, end = block_span(self.block_bytes, part)
        rows = np.empty((self.num_blocks, 3), np.uint64)
        rows[:, 0] = np.arange(self.num_blocks, dtype=np.uint64) * self.block_bytes + self.address + start
        rows[:, 1] = end - start
        rows[:, 2] = self.device_id
        return rows


class HostMemory:
    """Private host memory as a region; alive as long as this object."""

    def __init__(self, block_bytes: int, num_blocks: int) -> None:
        self._view = memoryview(mmap.mmap(-1, block_bytes * num_blocks))
        self.region = Region(address_of(self._view), block_bytes, num_blocks)

    def numbers(self, count: int) -> list[int]:
        """Return the first ``count`` 64-bit numbers."""
        return self._view[: 8 * count].cast("Q").tolist()

    def block(self, number: int) -> memoryview:
        """Return one of its blocks."""
        size = self.region.block_bytes
        return self._view[number * size : (number + 1) * size]


def region_of(memory: KVMemory) -> Region:
    """Return the pool's region. Raises TransferError if its blocks do not lie side by side."""
    size = memory.layout.block_bytes
    count = memory.num_blocks
    if isinstance(memory, OnDevice) and memory.pool.device.type == "cuda":
        return Region(memory.pool.data_ptr(), size, count, True, memory.pool.device.index or 0)
    if isinstance(memory, FlatMemory):
        return Region(address_of(memory.pool_view), size, count)
    first, last = (address_of(memory.write_view(number)) for number in (0, count - 1))
    if last != first + (count - 1) * size:
        raise TransferError("the KV pool is not in one piece of memory")
    return Region(first, size, count)
