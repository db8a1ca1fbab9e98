"""The pool of KV blocks: one tensor, whose blocks are read and written as bytes by transfers between processes.

A model with several groups of layers has a pool for each of them, all in one allocation (``engine.kv_cache.regions``).
``[num_blocks, num_layers, parts, num_kv_heads, block_size, head_dim]``, zeroed: one block is one contiguous piece, and a
layer's tensor is a view. The parts are key and value, or one latent row. Block 0 is the null block; it stays zero.

The sums of blocks' digests are computed where the blocks are: on a device, by a Triton kernel. Word j of a block (64 bits)
has the key ``seed + j · _STEP``. The first sum of ``fold64`` adds the product of the lower and the upper half of each word
that was xored with its key; the second one adds the words. Sums are modulo 2**64: the order of parts does not matter.
"""

import importlib.util
import logging
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
from engine.compute.staging import to_device
from engine.connector import Computed, StateRecord
from engine.device_pool import DevicePool

logger = logging.getLogger(__name__)

Numbers = npt.NDArray[np.uint64]
Fold = Callable[[Sequence[int], int, int, Numbers], Numbers]
"""(blocks, first byte, end, seeds) → sums ``[2, n]``. Waits for the device."""

WORD_BYTES = 8
_STEP = 0x9E3779B97F4A7C15
TILE = 1024
NUM_TILES = 4
NUM_WARPS = 4
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_cuda: Any = torch.cuda
# The priority of a stream whose kernels get free processors before those of the engine's steps.
_FIRST = -1


def signed(number: int) -> int:
    """Return the signed number with the same 64 bits: the kernel counts by these, which wrap like others."""
    return (number + 2**63) % 2**64 - 2**63


STEPS = {"step": signed(_STEP), "tile_step": signed(TILE * _STEP)}


class TritonFold:
    """Adds up blocks of a pool, a contiguous tensor whose blocks have whole words."""

    def __init__(self, pool: Tensor) -> None:
        self._words = pool.view(len(pool), -1).view(torch.int64)

    def __call__(self, block_ids: Sequence[int], start: int, end: int, seeds: Numbers) -> Numbers:
        """See ``Fold``."""
        from engine.kv_cache.triton_kernels import fold_kernel

        count = len(block_ids)
        packed = np.zeros((4, count), np.int64)
        packed[:2] = block_ids, seeds.view(np.int64)
        on_device = to_device(packed, self._words.device)
        num_words = (end - start) // WORD_BYTES
        numbers = (count, self._words.shape[1], start // WORD_BYTES, num_words)
        fold_kernel[(count, -(-num_words // (TILE * NUM_TILES)))](
            self._words,
            on_device,
            *numbers,
            **STEPS,
            tile=TILE,
            num_tiles=NUM_TILES,
            num_warps=NUM_WARPS,
        )
        return on_device[2:].cpu().numpy().view(np.uint64)


def find_fold(pool: Tensor) -> Fold | None:
    """Return what adds up blocks of a pool ``[num_blocks, num_layers, ...]``, tried out; None, and log why, if none can."""
    if pool.device.type != "cuda" or not pool.numel():
        return None
    layer_bytes = pool[0, 0].numel() * pool.element_size()
    if importlib.util.find_spec("triton") is None:
        why_not = "Triton is not installed"
    elif layer_bytes % WORD_BYTES:
        why_not = f"a layer of a block has {layer_bytes} bytes, which is no multiple of {WORD_BYTES}"
    else:
        try:
            # Tried out here, on the null block: at a request's first digest it would be too late for another way.
            fold = TritonFold(pool)
            fold([0], 0, WORD_BYTES, np.zeros(1, np.uint64))
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises
            why_not = repr(error)
        else:
            return fold
    logger.warning("blocks are copied to the host to be digested: %s", why_not)
    return None


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
    start = 0
    pool_view: memoryview | None = None
    other_regions: "tuple[PagedKVMemory, ...]" = ()
    states: StateRecord | None = None

    def __init__(self, layout: KVLayout, num_blocks: int, pool: Tensor) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.pool = pool
        self.layers = list(pool.unbind(1))

    @property
    def regions(self) -> "tuple[PagedKVMemory, ...]":
        """See KVMemory. Not an attribute, for the reason of ``StagedKVMemory.device_pool``."""
        return self, *self.other_regions

    @property
    def device_pool(self) -> DevicePool | None:
        """See KVMemory."""
        return None

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
        """Copy whole blocks, (from, to), after what was launched before; no pair reads a block that another one writes.

        pairs: at least one.
        """
        sources, targets = zip(*pairs, strict=True)
        self.pool[list(targets)] = self.pool[list(sources)]

    @abstractmethod
    def close(self) -> None:
        """Free the memory; the pool and its views must not be used any more."""

    def _check(self, block_id: int) -> int:
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id} is not in the pool of {self.num_blocks} blocks")
        return block_id


class HostPages:
    """Zeroed host memory: an anonymous file (memfd) that another process may map, else private pages.

    memfd: the file's descriptor, None if the system has none, and after ``close``.
    """

    def __init__(self, num_bytes: int) -> None:
        self.memfd: int | None = None
        if hasattr(os, "memfd_create"):
            self.memfd = os.memfd_create("kvbaton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.memfd, num_bytes)
        # Faulted in now (a second per GiB): the first write to a page costs five copies, for which a request would wait.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self.view = memoryview(mmap.mmap(-1 if self.memfd is None else self.memfd, num_bytes, flags=flags))

    def close(self) -> None:
        """Close the file; the pages go when the last view does. May be called twice."""
        if self.memfd is not None:
            os.close(self.memfd)
            self.memfd = None


class MappedKVMemory(PagedKVMemory):
    """The pool in host memory. The views are the pool itself; pool_view is all of it.

    pages, start: where it lies, from this byte on; None: in pages of its own. memfd: the file of all these pages.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, pages: HostPages | None = None, start: int = 0
    ) -> None:
        num_bytes = num_blocks * layout.block_bytes
        self._pages = pages or HostPages(num_bytes)
        self.memfd = self._pages.memfd
        self.start = start
        self.pool_view: memoryview = self._pages.view[start : start + num_bytes]
        numbers = self.pool_view or bytearray(1)  # a model of recurrent layers alone has blocks without bytes
        flat = torch.frombuffer(numbers, dtype=torch.uint8)[:num_bytes].view(TORCH_DTYPES[layout.dtype])
        super().__init__(layout, num_blocks, flat.view(num_blocks, *layout.shape))

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
        """See PagedKVMemory and ``HostPages.close``."""
        self._pages.close()
        self.memfd = None


class PinnedRow:
    """Host memory that copies to and from a device use at full speed. Implements ``engine.device_pool.HostRow``."""

    def __init__(self, content: Tensor) -> None:
        self.content = content
        self.view: memoryview = content.numpy().data


class PinnedParts:
    """Rows that a device is copied to until ``done``. Implements ``engine.device_pool.HostParts``."""

    def __init__(self, rows: list[PinnedRow], done: Computed) -> None:
        self._rows = rows
        self._done = done

    def views(self) -> list[memoryview]:
        """See HostParts."""
        self._done.synchronize()
        return [row.view for row in self._rows]


class StagedKVMemory(PagedKVMemory):
    """The pool on a device, reached through copies in host memory, or written by a library that reaches the device itself.

    Implements ``engine.device_pool.DevicePool``. Copies and digests run on a stream of their own, which does not wait for
    the kernels of a step: a request waits for its KV. flat: the pool's zeroed bytes on the device; None: they are allocated.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, device: torch.device, flat: Tensor | None = None
    ) -> None:
        if flat is None:
            flat = torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8, device=device)
        pool = flat.view(TORCH_DTYPES[layout.dtype]).view(num_blocks, *layout.shape)
        super().__init__(layout, num_blocks, pool)
        self._rows = self.pool.view(num_blocks, -1).view(torch.uint8)
        self._copies = _cuda.Stream(device, priority=_FIRST) if device.type == "cuda" else None
        self._computed: Computed = _AT_ONCE
        # The rows that are being copied to the device, and the event of the end.
        self._writing: deque[tuple[Any, Sequence[PinnedRow]]] = deque()
        self._lock = threading.Lock()
        self._fold = find_fold(self.pool)

    @property
    def device_pool(self) -> DevicePool:
        """See KVMemory. Not an attribute: the cycle would keep the device's memory until the garbage collector runs."""
        return self

    @property
    def address(self) -> int:
        """See DevicePool."""
        return self.pool.data_ptr()

    @property
    def can_fold(self) -> bool:
        """See DevicePool."""
        return self._fold is not None

    def fold(self, block_ids: Sequence[int], start: int, end: int, seeds: Numbers) -> Numbers:
        """See DevicePool."""
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
        """See DevicePool."""
        rows = self.host_rows(len(block_ids), end - start)
        with torch.cuda.stream(self._copies):
            for row, block_id in zip(rows, block_ids, strict=True):
                row.content.copy_(self._rows[self._check(block_id), start:end], non_blocking=True)
            return PinnedParts(rows, self._launched())

    def host_rows(self, count: int, num_bytes: int) -> list[PinnedRow]:
        """See DevicePool."""
        whole = torch.empty(count, num_bytes, dtype=torch.uint8, pin_memory=self._copies is not None)
        return list(map(PinnedRow, whole))

    def write_rows(self, block_ids: Sequence[int], start: int, rows: Sequence[PinnedRow]) -> None:
        """See DevicePool."""
        with torch.cuda.stream(self._copies):
            for row, block_id in zip(rows, block_ids, strict=True):
                part = self._rows[self._check(block_id), start : start + len(row.content)]
                part.copy_(row.content, non_blocking=True)
            done = self._launched()
        with self._lock:
            self._writing.append((done, rows))
        self._forget_written()

    def landing_area(self, layout: KVLayout, num_blocks: int) -> "StagedKVMemory":
        """See DevicePool. A library may write it at once: what was launched on that memory before is over."""
        with torch.cuda.stream(self._copies):
            area = StagedKVMemory(layout, num_blocks, self.pool.device)
            self._launched().synchronize()
        return area

    def launch(self, work: Callable[[], None]) -> Computed:
        """See DevicePool."""
        with torch.cuda.stream(self._copies):
            work()
            launched: Computed = self._launched()
        return launched

    def wait_until_unused(self) -> None:
        """See DevicePool."""
        self._computed.synchronize()

    @property
    def is_written(self) -> bool:
        """See DevicePool."""
        self._forget_written()
        return not self._writing

    def commit(self, block_ids: list[int]) -> None:
        """See PagedKVMemory. Returns when the device has the bytes."""
        with self._lock:
            writing = list(self._writing)
        for done, _ in writing:  # without the lock: other threads begin further copies meanwhile
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
        event = _cuda.Event(blocking=True)  # who waits for it sleeps: the step thread needs the core
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
