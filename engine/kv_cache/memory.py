"""The pool of KV blocks: one tensor, whose blocks are read and written as bytes by transfers between processes.

``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``, zeroed: one block is one contiguous piece, and a
layer's tensor is a view. Block 0 is the null block; it stays zero.
"""

import mmap
import os
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from contract.layout import KVLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_POOL_NAME = "kvbaton-kv"


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
    def mark_computed(self) -> None:
        """Make ``read_view`` wait for everything that was launched before this call."""

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

    def mark_computed(self) -> None:
        """Do nothing: a step on the host is computed when it returns."""

    def close(self) -> None:
        """See PagedKVMemory; the pages go when the last view does."""
        if self.memfd is not None:
            os.close(self.memfd)
            self.memfd = None


class StagedKVMemory(PagedKVMemory):
    """The pool on a device, reached through copies in host memory.

    ``read_view`` is a copy made behind the last ``mark_computed``. What is put into a ``write_view`` reaches the
    device at ``commit``; blocks of other requests are never touched.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        shape = _pool_shape(layout, num_blocks)
        super().__init__(
            layout, num_blocks, torch.zeros(shape, dtype=TORCH_DTYPES[layout.dtype], device=device)
        )
        self._staged: dict[int, Tensor] = {}
        cuda: Any = torch.cuda
        is_cuda = device.type == "cuda"
        self._computed = cuda.Event(blocking=True) if is_cuda else None
        self._copies = cuda.Stream(device) if is_cuda else None

    def read_view(self, block_id: int) -> memoryview:
        """See PagedKVMemory. Waits for the event of ``mark_computed``, not for what was launched after it."""
        if self._computed is not None:
            self._computed.synchronize()
        with torch.cuda.stream(self._copies):
            copy = self.pool[self._check(block_id)].to("cpu", copy=True)
        return _as_bytes(copy).toreadonly()

    def write_view(self, block_id: int) -> memoryview:
        """See PagedKVMemory. Asking again before ``commit`` gives the same bytes."""
        if self._check(block_id) not in self._staged:
            self._staged[block_id] = torch.zeros(self.pool.shape[1:], dtype=self.pool.dtype)
        return _as_bytes(self._staged[block_id])

    def commit(self, block_ids: list[int]) -> None:
        """See PagedKVMemory. Returns when the device has the bytes; a step that still runs is waited for first."""
        if self._copies is not None:
            self._copies.wait_event(self._computed)
        with torch.cuda.stream(self._copies):
            for block_id in block_ids:
                self.pool[block_id].copy_(self._staged.pop(block_id))
        if self._copies is not None:
            self._copies.synchronize()

    def mark_computed(self) -> None:
        """See PagedKVMemory."""
        if self._computed is not None:
            self._computed.record()

    def close(self) -> None:
        """See PagedKVMemory."""
        self._staged.clear()


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


def _as_bytes(block: Tensor) -> memoryview:
    return block.view(-1).view(torch.uint8).numpy().data
