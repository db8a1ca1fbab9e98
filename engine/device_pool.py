"""The pool of KV blocks on a device, as a connector and KV tiers see it, and copies of its blocks in host memory."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from contract.layout import KVLayout
from engine.connector import Computed, KVMemory


class HostParts(Protocol):
    """A copy of blocks, or of a part of each, in host memory."""

    def views(self) -> list[memoryview]:
        """Wait until it is made, and return the bytes of each block."""


class HostRow(Protocol):
    """Host memory from which a block is copied to a device. view: its bytes."""

    view: memoryview


class DevicePool(KVMemory, Protocol):
    """A pool, a tensor, that a library may write without host memory in between; block i is at address + i · block_bytes."""

    pool: Any

    @property
    def can_fold(self) -> bool:
        """True if ``fold`` may be called."""

    @property
    def address(self) -> int:
        """The address of the pool, in its device's memory."""

    @property
    def is_written(self) -> bool:
        """True if a ``commit`` would wait for nothing."""

    def begin_reading(self, block_ids: Sequence[int], start: int, end: int) -> HostParts:
        """Begin to copy bytes ``start``..``end`` - 1 of each block to host memory."""

    def host_rows(self, count: int, num_bytes: int) -> Sequence[HostRow]:
        """Return host memory for so many bytes of each of so many blocks, with any content."""

    def write_rows(self, block_ids: Sequence[int], start: int, rows: Sequence[Any]) -> None:
        """Begin to copy one of ``host_rows`` to each block, from byte ``start`` on. A ``commit`` waits for the end."""

    def fold(
        self, block_ids: Sequence[int], start: int, end: int, seeds: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.uint64]:
        """Return both sums ``[2, n]`` of bytes ``start``..``end`` - 1 of each block (``engine.kv_cache.memory``)."""

    def landing_area(self, layout: KVLayout, num_blocks: int) -> "DevicePool":
        """Return memory of the same device for so many blocks of a peer's layout, which may be written at once."""

    def launch(self, work: Callable[[], None]) -> Computed:
        """Start operations on this pool beside the steps of the engine; return what waits for their end."""

    def wait_until_unused(self) -> None:
        """Wait for the steps that were launched before: they may use blocks that a library or a copy writes now."""
