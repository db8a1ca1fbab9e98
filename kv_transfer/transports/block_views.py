"""Blocks of a KV pool as memory views, whole or a part of each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
import numpy.typing as npt

from contract.errors import TransferError
from engine.connector import KVMemory
from engine.device_pool import DevicePool, HostParts, HostRow
from kv_transfer.native.folding import WORD_BYTES, fold_words
from kv_transfer.protocol.digests import FoldableViews, Numbers, fold_in_host_memory
from kv_transfer.protocol.reads import BlockPart, Read

BlockIds = Sequence[int] | npt.NDArray[np.int64]


def block_span(block_bytes: int, part: BlockPart | None) -> tuple[int, int]:
    """Return where ``part`` begins and ends in a block (None: all of it). Raises TransferError if it is outside."""
    if part is None:
        return 0, block_bytes
    end = part.start_byte + part.num_bytes
    if part.start_byte < 0 or part.num_bytes < 1 or end > block_bytes:
        raise TransferError(f"bytes {part.start_byte}..{end - 1} are not in a block of {block_bytes} bytes")
    return part.start_byte, end


def block_outside(ids: npt.NDArray[np.int64], num_blocks: int) -> int | None:
    """Return one of the blocks (at least one) that a pool of so many does not have, if any."""
    at = ids.view(np.uint64).argmax()  # a negative one is larger than all
    return None if 0 <= (block_id := ids.item(at)) < num_blocks else block_id


def address_of(memory: memoryview) -> int:
    """Return where it begins; it may be read-only."""
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address


class BlockViews(FoldableViews):
    """The blocks ``block_ids`` of a flat pool, or the part of each, as views made on access: keeping thousands is slow.

    ids: the blocks as 64-bit numbers. address: where the pool begins. Raises IndexError for a block outside the pool,
    TransferError for a part outside a block.
    """

    def __init__(
        self,
        pool: memoryview,
        block_bytes: int,
        block_ids: BlockIds,
        part: BlockPart | None = None,
        address: int | None = None,
    ) -> None:
        ids = np.asarray(block_ids, np.int64)
        num_blocks = pool.nbytes // block_bytes
        if len(ids) and (outside := block_outside(ids, num_blocks)) is not None:
            raise IndexError(f"block {outside} of a pool of {num_blocks}")
        self.pool = pool
        self.block_bytes = block_bytes
        self.block_ids = block_ids
        self.part = part
        self.ids = ids
        self.address = address_of(pool) if address is None else address
        self._span = block_span(block_bytes, part)
        self._addresses: npt.NDArray[np.uint64] | None = None

    @property
    def num_pool_bytes(self) -> int:
        """The size of the pool."""
        return self.pool.nbytes

    @property
    def first_address(self) -> int:
        """The address of a view of the pool's block 0."""
        return self.address + self._span[0]

    @property
    def view_bytes(self) -> int:
        """The size of each view."""
        return self._span[1] - self._span[0]

    def keep_addresses(self) -> None:
        """Compute the addresses now, not when a read waits for them."""
        addresses = np.empty(len(self.ids), np.uint64)
        self.put_addresses(addresses)
        self._addresses = addresses

    def put_addresses(self, out: npt.NDArray[np.generic]) -> None:
        """Write the address of each view, as 64-bit numbers."""
        if self._addresses is not None:
            out[:] = self._addresses
            return
        np.multiply(self.ids, self.block_bytes, out=out, casting="unsafe")
        np.add(out, self.first_address, out=out, casting="unsafe")

    def fold(self, sums: Numbers, seeds: Numbers, first_word: int) -> None:
        """See FoldableViews."""
        addresses = np.empty(len(self.ids), np.uint64)
        self.put_addresses(addresses)
        fold_words()(sums, addresses, seeds, first_word, self.view_bytes // WORD_BYTES)

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.block_ids)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...

    @overload
    def __getitem__(self, index: slice) -> "BlockViews": ...

    def __getitem__(self, index: int | slice) -> "memoryview | BlockViews":
        """Return one view, or fewer blocks."""
        if isinstance(index, slice):
            some = BlockViews.__new__(BlockViews)
            some.__dict__.update(self.__dict__)  # five times as fast as copy()
            some.block_ids = self.block_ids[index]
            some.ids = self.ids[index]
            if self._addresses is not None:
                some._addresses = self._addresses[index]
            return some
        at = self.block_ids[index] * self.block_bytes
        (start, end) = self._span
        return self.pool[at + start : at + end]

    def __iter__(self) -> Iterator[memoryview]:
        """Return an iterator over the views."""
        begins = self.ids * self.block_bytes + self._span[0]
        spans = map(slice, begins.tolist(), (begins + self.view_bytes).tolist())
        return map(self.pool.__getitem__, spans)  # without Python code for each view


class _DeviceViews(FoldableViews):
    """The blocks ``block_ids`` of a pool on a device, or the part of each. Raises TransferError as ``BlockViews``."""

    def __init__(self, memory: DevicePool, block_ids: Sequence[int], part: BlockPart | None = None) -> None:
        self.block_bytes = memory.layout.block_bytes
        self.part = part
        self._memory = memory
        self._block_ids = block_ids
        self._span = block_span(self.block_bytes, part)

    @property
    def view_bytes(self) -> int:
        """The size of each view."""
        return self._span[1] - self._span[0]

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._block_ids)

    def _fold_there(self, sums: Numbers, seeds: Numbers, first_word: int) -> None:
        """Add the sums of what is on the device now."""
        start = first_word * WORD_BYTES
        sums += self._memory.fold(self._block_ids, start, start + self.view_bytes, seeds)


class ReadingViews(_DeviceViews):
    """Blocks of a pool on a device that are read only. Each view is a copy, made on access."""

    def fold(self, sums: Numbers, seeds: Numbers, first_word: int) -> None:
        """See FoldableViews."""
        if self._memory.can_fold:
            self._fold_there(sums, seeds, first_word)
        else:
            fold_in_host_memory(self, sums, seeds, first_word)

    def begin(self) -> HostParts:
        """Begin to copy all of them to host memory."""
        return self._memory.begin_reading(self._block_ids, *self._span)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...

    @overload
    def __getitem__(self, index: slice) -> "ReadingViews": ...

    def __getitem__(self, index: int | slice) -> "memoryview | ReadingViews":
        """Return one view, or fewer blocks."""
        if isinstance(index, slice):
            return ReadingViews(self._memory, self._block_ids[index], self.part)
        return self._memory.begin_reading([self._block_ids[index]], *self._span).views()[0]

    def __iter__(self) -> Iterator[memoryview]:
        """Return an iterator over the views; all are copied at once."""
        return iter(self.begin().views())


@dataclass
class _Landing:
    """The way in which blocks land. staged: by block, the host memory that its bytes are put into."""

    is_direct: bool = False
    staged: dict[int, HostRow] = field(default_factory=dict)


class LandingViews(_DeviceViews):
    """Blocks of a pool on a device that bytes are to be put into.

    Each view is host memory, until ``settle`` copies it to the device: what is not settled never gets there. After
    ``land_directly`` a library writes to the device itself, and each view is a copy of what is there now.
    memory: the pool. read: of the fetch that the blocks belong to.
    """

    def __init__(
        self, memory: DevicePool, block_ids: Sequence[int], part: BlockPart | None, read: Read
    ) -> None:
        super().__init__(memory, block_ids, part)
        self.memory = memory
        self._read = read
        self._landing = _Landing()

    @property
    def address(self) -> int:
        """The address of the pool on its device."""
        return self._memory.address

    @property
    def num_pool_bytes(self) -> int:
        """The size of the pool."""
        return self.block_bytes * self._memory.num_blocks

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The blocks as 64-bit numbers."""
        return np.asarray(self._block_ids, np.int64)

    def land_directly(self) -> None:
        """Have a library write the blocks from now on, which holds for all slices of these views."""
        self._wait_until_unused()
        self._landing.is_direct = True

    @property
    def folds_there(self) -> bool:
        """True if the sums of what has landed are computed on the device."""
        return self._landing.is_direct and self._memory.can_fold

    def settle(self) -> None:
        """Begin to copy the views to the device, and release their memory. They are not used any more."""
        staged = self._landing.staged
        chosen = [block_id for block_id in self._block_ids if block_id in staged]
        if chosen:
            self._wait_until_unused()
            self._memory.write_rows(chosen, self._span[0], [staged.pop(block_id) for block_id in chosen])

    def fold(self, sums: Numbers, seeds: Numbers, first_word: int) -> None:
        """See FoldableViews."""
        if self.folds_there:
            self._fold_there(sums, seeds, first_word)
        else:
            fold_in_host_memory(self, sums, seeds, first_word)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...

    @overload
    def __getitem__(self, index: slice) -> "LandingViews": ...

    def __getitem__(self, index: int | slice) -> "memoryview | LandingViews":
        """Return one view, or fewer blocks."""
        if isinstance(index, slice):
            some = LandingViews(self._memory, self._block_ids[index], self.part, self._read)
            some._landing = self._landing
            return some
        return next(iter(self[index : index + 1]))

    def __iter__(self) -> Iterator[memoryview]:
        """Return an iterator over the views; what has landed is copied from the device at once."""
        if self._landing.is_direct:
            return iter(self._memory.begin_reading(self._block_ids, *self._span).views())
        staged = self._landing.staged
        missing = [block_id for block_id in self._block_ids if block_id not in staged]
        if missing:
            staged.update(zip(missing, self._memory.host_rows(len(missing), self.view_bytes), strict=True))
        return iter([staged[block_id].view for block_id in self._block_ids])

    def _wait_until_unused(self) -> None:
        """Wait once: blocks are written that earlier steps may have used."""
        self._read.wait_once(self._memory.wait_until_unused)


def settle(views: Sequence[memoryview]) -> None:
    """Begin to copy bytes that were put into ``views``, and verified, to where they belong, if that is elsewhere."""
    if isinstance(views, LandingViews):
        views.settle()


def read_views(memory: KVMemory, block_ids: BlockIds, part: BlockPart | None = None) -> Sequence[memoryview]:
    """Return ``read_view`` of each block, or a part; fast if the pool is flat. Raises as ``BlockViews``."""
    if memory.pool_view is not None:
        return BlockViews(memory.pool_view.toreadonly(), memory.layout.block_bytes, block_ids, part)
    if (device_pool := memory.device_pool) is not None:
        return ReadingViews(device_pool, np.asarray(block_ids, np.int64).tolist(), part)
    start, end = block_span(memory.layout.block_bytes, part)
    return [memory.read_view(int(block_id))[start:end] for block_id in block_ids]


def write_views(
    memory: KVMemory, block_ids: Sequence[int], part: BlockPart | None = None, read: Read | None = None
) -> Sequence[memoryview]:
    """Return ``write_view`` of each block, or a part; fast if the pool is flat. Raises as ``BlockViews``.

    read: see ``LandingViews``; None: the blocks belong to no fetch that has others.
    """
    if memory.pool_view is not None:
        return BlockViews(memory.pool_view, memory.layout.block_bytes, block_ids, part)
    if (device_pool := memory.device_pool) is not None:
        return LandingViews(device_pool, block_ids, part, read or Read())
    start, end = block_span(memory.layout.block_bytes, part)
    return [memory.write_view(block_id)[start:end] for block_id in block_ids]


def view_bytes_of(views: Sequence[memoryview]) -> int:
    """Return the size of each of the views, which are equal, without making one where possible."""
    return views.view_bytes if isinstance(views, FoldableViews) else views[0].nbytes


def check_group(group: int, num_groups: int, who: str) -> None:
    """Raise TransferError for a group of layers that ``who`` does not have."""
    if group >= num_groups:
        raise TransferError(f"{who} has {num_groups} groups of layers, and no number {group}")


def check_sizes(views: Sequence[memoryview], num_bytes: int, who: str) -> None:
    """Raise TransferError unless each view has ``num_bytes``, the size of what is read of each block of ``who``."""
    is_uniform = isinstance(views, FoldableViews)
    sizes = {view_bytes_of(views)} if is_uniform else {view.nbytes for view in views}
    if sizes - {num_bytes}:
        raise TransferError(f"a block of {who} has {num_bytes} bytes, not {min(sizes - {num_bytes})}")
