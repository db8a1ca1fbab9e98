"""The pool of KV blocks: one tensor, whose blocks are read and written as bytes by transfers between processes.

``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``, zeroed: one block is one contiguous piece, and a
layer's tensor is a view. Block 0 is the null block; it stays zero.
"""

import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from contract.errors import InternalError
from contract.layout import KVLayout
from engine.connector import Computed
from engine.kv_cache.folding import find_fold

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_POOL_NAME = "kvbaton-kv"
_cuda: Any = torch.cuda
_FIRST = -1
"""The priority of a stream whose kernels get free processors before those of the engine's steps."""


class _AtOnce:
    """A point that every device has passed; see Computed."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True."""
        return True


_AT_ONCE = _AtOnce()


class PagedKVMemory(ABC):
    """A pool on one device. Implements ``engine.connector.KVMemory``; the views are invalid after ``close``."""

    memfd: int | None = None
    pool_view: memoryview | None = None

    def __init__(self, layout: KVLayout, num_blocks: int, pool: Tensor) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.pool = pool
        self.layers = list(pool.unbind(1))

    @abstractmethod
    def read_view(self, block_id: int) -> memoryview:
        """Return the bytes of one block, read-only."""

    @abstractmethod
    def write_view(self, block_id: int) -> memoryview:
        """Return the memory for the bytes of one block."""

    @abstractmethod
    def commit(self, block_ids: list[int]) -> None:
        """Make what was written to these blocks visible to the device."""

    @abstractmethod
    def mark_computed(self) -> Computed:
        """Return what waits for everything that was launched before this call."""

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), after what was launched before. No pair reads a block that another one writes."""
        if pairs:
            sources, targets = zip(*pairs, strict=True)
            self.pool[list(targets)] = self.pool[list(sources)]

    @abstractmethod
    def close(self) -> None:
        """Free the memory; the pool and its views must not be used any more."""

    def _check(self, block_id: int) -> int:
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id} is not in the pool of {self.num_blocks} blocks")
        return block_id


class MappedKVMemory(PagedKVMemory):
    """The pool in host memory: an anonymous file (memfd) that another process may map, else private pages.

    memfd: the file's descriptor, None if the system has none. The views are the pool itself; pool_view is all of it.
    Where the system can, all pages are faulted in at start (a second per GiB): the first write to a page costs five times a
    copy, and would add to the time that a request waits for its KV.
    """

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        num_bytes = num_blocks * layout.block_bytes
        self.memfd = _create_memfd(num_bytes)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self._bytes = mmap.mmap(-1 if self.memfd is None else self.memfd, num_bytes, flags=flags)
        self.pool_view: memoryview = memoryview(self._bytes)
        flat = torch.frombuffer(self._bytes, dtype=TORCH_DTYPES[layout.dtype])
        super().__init__(layout, num_blocks, flat.view(_pool_shape(layout, num_blocks)))

    def read_view(self, block_id: int) -> memoryview:
        """See PagedKVMemory."""
        return self.write_view(block_id).toreadonly()

    def write_view(self, block_id: int) -> memoryview:
        """See PagedKVMemory."""
        start = self._check(block_id) * self.layout.block_bytes
        return self.pool_view[start : start + self.layout.block_bytes]

    def commit(self, block_ids: list[int]) -> None:
        """Do nothing: a write is visible at once."""

    def mark_computed(self) -> Computed:
        """Return what does not wait: a step on the host is computed when it returns."""
        return _AT_ONCE

    def close(self) -> None:
        """See PagedKVMemory; the pages go when the last view does."""
        if self.memfd is not None:
            os.close(self.memfd)
            self.memfd = None


class PinnedRow:
    """Host memory that copies to and from a device use at full speed. Implements ``engine.connector.HostRow``."""

    def __init__(self, content: Tensor) -> None:
        self.content = content
        self.view: memoryview = content.numpy().data


class PinnedParts:
    """Rows that a device is copied to until ``done``. Implements ``engine.connector.HostParts``."""

    def __init__(self, rows: list[PinnedRow], done: Computed) -> None:
        self._rows = rows
        self._done = done

    def views(self) -> list[memoryview]:
        """See HostParts."""
        self._done.synchronize()
        return [row.view for row in self._rows]


class StagedKVMemory(PagedKVMemory):
    """The pool on a device, reached through copies in host memory, or written by a library that reaches the device itself.

    Implements ``engine.connector.LandsDirectly``. Copies and digests run on a stream of their own, which
    does not wait for the kernels of a step: a request waits for its KV.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        shape = _pool_shape(layout, num_blocks)
        super().__init__(
            layout, num_blocks, torch.zeros(shape, dtype=TORCH_DTYPES[layout.dtype], device=device)
        )
        self._rows = self.pool.view(num_blocks, -1).view(torch.uint8)
        self._copies = _cuda.Stream(device, priority=_FIRST) if device.type == "cuda" else None
        self._computed: Computed = _AT_ONCE
        self._writing: deque[tuple[Any, Sequence[PinnedRow]]] = deque()
        """The rows that are being copied to the device, and the event of the end."""
        self._lock = threading.Lock()
        self._fold = find_fold(self.pool)

    @property
    def address(self) -> int:
        """See LandsDirectly."""
        return self.pool.data_ptr()

    @property
    def can_fold(self) -> bool:
        """See LandsDirectly."""
        return self._fold is not None

    def fold(
        self, block_ids: Sequence[int], start: int, end: int, seeds: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.uint64]:
        """See LandsDirectly."""
        if self._fold is None:
            raise InternalError("the sums of blocks cannot be computed on this device")
        with torch.cuda.stream(self._copies):
            return self._fold(list(map(self._check, block_ids)), start, end, seeds)

    def read_view(self, block_id: int) -> memoryview:
        """See PagedKVMemory."""
        return self.begin_reading([block_id], 0, self.layout.block_bytes).views()[0].toreadonly()

    def write_view(self, block_id: int) -> memoryview:
        """Raise InternalError: no view is the pool itself."""
        raise InternalError(f"block {block_id} is on a device, which is written by write_rows")

    def begin_reading(self, block_ids: Sequence[int], start: int, end: int) -> PinnedParts:
        """See LandsDirectly."""
        rows = self.host_rows(len(block_ids), end - start)
        with torch.cuda.stream(self._copies):
            for row, block_id in zip(rows, block_ids, strict=True):
                row.content.copy_(self._rows[self._check(block_id), start:end], non_blocking=True)
            return PinnedParts(rows, self._launched())

    def host_rows(self, count: int, num_bytes: int) -> list[PinnedRow]:
        """See LandsDirectly."""
        whole = torch.empty(count, num_bytes, dtype=torch.uint8, pin_memory=self._copies is not None)
        return list(map(PinnedRow, whole))

    def write_rows(self, block_ids: Sequence[int], start: int, rows: Sequence[PinnedRow]) -> None:
        """See LandsDirectly."""
        with torch.cuda.stream(self._copies):
            for row, block_id in zip(rows, block_ids, strict=True):
                part = self._rows[self._check(block_id), start : start + len(row.content)]
                part.copy_(row.content, non_blocking=True)
            done = self._launched()
        with self._lock:
            self._writing.append((done, rows))
        self._forget_written()

    def landing_area(self, layout: KVLayout, num_blocks: int) -> "StagedKVMemory":
        """See LandsDirectly. A library may write it at once: what was launched on that memory before is over."""
        with torch.cuda.stream(self._copies):
            area = StagedKVMemory(layout, num_blocks, self.pool.device)
            self._launched().synchronize()
        return area

    def launch(self, work: Callable[[], None]) -> Computed:
        """See LandsDirectly."""
        with torch.cuda.stream(self._copies):
            work()
            launched: Computed = self._launched()
        return launched

    def wait_until_unused(self) -> None:
        """See LandsDirectly."""
        self._computed.synchronize()

    @property
    def is_written(self) -> bool:
        """See LandsDirectly."""
        self._forget_written()
        return not self._writing

    def commit(self, block_ids: list[int]) -> None:
        """See PagedKVMemory. Returns when the device has the bytes."""
        with self._lock:
            writing = list(self._writing)
        for done, _ in writing:
            done.synchronize()
        self._forget_written()

    def mark_computed(self) -> Computed:
        """See PagedKVMemory."""
        self._computed = self._launched()
        return self._computed

    def close(self) -> None:
        """See PagedKVMemory."""
        self.commit([])

    def _launched(self) -> Any:
        """Return what waits for what this thread has launched on the current stream."""
        if self._copies is None:
            return _AT_ONCE
        event = _cuda.Event(blocking=True)
        event.record()
        return event

    def _forget_written(self) -> None:
        """Release the memory of copies that are over, the oldest first. From any thread."""
        with self._lock:
            while self._writing and self._writing[0][0].query():
                self._writing.popleft()


def allocate(layout: KVLayout, num_blocks: int, device: torch.device) -> PagedKVMemory:
    """Return a zeroed pool on this device."""
    if device.type == "cpu":
        return MappedKVMemory(layout, num_blocks)
    return StagedKVMemory(layout, num_blocks, device)


def _pool_shape(layout: KVLayout, num_blocks: int) -> tuple[int, ...]:
    return (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)


def _create_memfd(num_bytes: int) -> int | None:
    if not hasattr(os, "memfd_create"):
        return None
    descriptor = os.memfd_create(_POOL_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    return descriptor
