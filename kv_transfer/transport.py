"""The seam below the data half: how bytes of lent blocks reach another process. Two roles, few verbs.

A *lease* is a list of pool blocks lent under (transfer id, attempt, lease token). Reads name blocks by their index
in that list, so nobody can ask for a block outside it. A read counts only when the lease was valid after its last byte.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Protocol, TypeGuard, overload, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from contract.errors import KvbatonError, TransferError, WorkerLostError
from engine.connector import KVMemory

MAX_PIECE_BYTES = 4 * 2**20
MAX_PIECE_BLOCKS = 256
MAX_GRANT_BYTES = 65536
BlockIds = Sequence[int] | npt.NDArray[np.int64]


def blocks_per_piece(block_bytes: int) -> int:
    """How many blocks are published, asked for or verified at once: MAX_PIECE_BYTES at most, or one block."""
    return max(1, min(MAX_PIECE_BLOCKS, MAX_PIECE_BYTES // block_bytes))


@runtime_checkable
class FlatMemory(KVMemory, Protocol):
    """A pool whose blocks lie side by side in host memory. pool_view: block i at i · block_bytes."""

    pool_view: memoryview


def is_flat(memory: KVMemory) -> TypeGuard[FlatMemory]:
    """What isinstance would say, in a fiftieth of the time."""
    return isinstance(getattr(memory, "pool_view", None), memoryview)


class BlockPart(msgspec.Struct, frozen=True):
    """The bytes ``start_byte``..``start_byte + num_bytes`` - 1 of a block, the same of every block of a read."""

    start_byte: Annotated[int, msgspec.Meta(ge=0)]
    num_bytes: Annotated[int, msgspec.Meta(ge=1)]


def block_span(block_bytes: int, part: BlockPart | None) -> tuple[int, int]:
    """Where ``part`` begins and ends in a block; None is the whole of it. Raises TransferError for what is not in it."""
    if part is None:
        return 0, block_bytes
    end = part.start_byte + part.num_bytes
    if part.start_byte < 0 or part.num_bytes < 1 or end > block_bytes:
        raise TransferError(f"bytes {part.start_byte}..{end - 1} are not in a block of {block_bytes} bytes")
    return part.start_byte, end


def block_outside(ids: npt.NDArray[np.int64], num_blocks: int) -> int | None:
    """One of the blocks, at least one, that a pool of so many does not have."""
    at = ids.view(np.uint64).argmax()  # a negative one is larger than all
    return None if 0 <= (block_id := ids.item(at)) < num_blocks else block_id


def address_of(memory: memoryview) -> int:
    """Where it begins, also if it cannot be written to."""
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address


def put_addresses(
    out: npt.NDArray[np.generic], ids: npt.NDArray[np.int64], block_bytes: int, first: int
) -> None:
    """Where something in each block is, as 64-bit numbers; ``first`` is where it is in block 0 of the pool."""
    np.multiply(ids, block_bytes, out=out, casting="unsafe")
    np.add(out, first, out=out, casting="unsafe")


class BlockViews(Sequence[memoryview]):
    """The blocks ``block_ids`` of a flat pool, as views that are made when they are looked at: keeping thousands is slow.

    part: of each block, if not all of it. ids: the blocks as 64-bit numbers. address: where the pool begins. Raises
    IndexError for a block that the pool does not have, TransferError for a part that no block has.
    """

    def __init__(
        self,
        pool: memoryview,
        block_bytes: int,
        block_ids: BlockIds,
        part: BlockPart | None = None,
        address: int | None = None,
    ) -> None:
        ids, num_blocks = np.asarray(block_ids, np.int64), pool.nbytes // block_bytes
        if len(ids) and (outside := block_outside(ids, num_blocks)) is not None:
            raise IndexError(f"block {outside} of a pool of {num_blocks}")
        self.pool, self.block_bytes, self.block_ids, self.part = pool, block_bytes, block_ids, part
        self.ids, self.address = ids, address_of(pool) if address is None else address
        self._span = block_span(block_bytes, part)
        self._kept_addresses: npt.NDArray[np.uint64] | None = None

    @property
    def first_address(self) -> int:
        """Where the view of the pool's block 0 begins, or would."""
        return self.address + self._span[0]

    @property
    def view_bytes(self) -> int:
        """Of each view."""
        return self._span[1] - self._span[0]

    def keep_addresses(self) -> None:
        """Work out where each view begins now, not when somebody waits for it."""
        kept = np.empty(len(self.ids), np.uint64)
        self.put_addresses(kept)
        self._kept_addresses = kept

    def put_addresses(self, out: npt.NDArray[np.generic]) -> None:
        """Where each view begins, as 64-bit numbers."""
        if self._kept_addresses is not None:
            out[:] = self._kept_addresses
            return
        put_addresses(out, self.ids, self.block_bytes, self.first_address)

    def __len__(self) -> int:
        """How many blocks."""
        return len(self.block_ids)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...

    @overload
    def __getitem__(self, index: slice) -> "BlockViews": ...

    def __getitem__(self, index: int | slice) -> "memoryview | BlockViews":
        """One view, or fewer blocks."""
        if isinstance(index, slice):
            some = BlockViews.__new__(BlockViews)
            some.__dict__.update(self.__dict__)  # a fifth of what copy() takes
            some.block_ids, some.ids = self.block_ids[index], self.ids[index]
            if self._kept_addresses is not None:
                some._kept_addresses = self._kept_addresses[index]
            return some
        at, (start, end) = self.block_ids[index] * self.block_bytes, self._span
        return self.pool[at + start : at + end]

    def __iter__(self) -> Iterator[memoryview]:
        """All views, one after the other."""
        begins = self.ids * self.block_bytes + self._span[0]
        spans = map(slice, begins.tolist(), (begins + self.view_bytes).tolist())
        return map(self.pool.__getitem__, spans)  # no Python for each of thousands


def flat_views(memory: FlatMemory, block_ids: BlockIds, part: BlockPart | None = None) -> BlockViews:
    """Of such a pool, to be read. Raises as ``BlockViews`` does."""
    return BlockViews(memory.pool_view.toreadonly(), memory.layout.block_bytes, block_ids, part)


def read_views(memory: KVMemory, block_ids: BlockIds, part: BlockPart | None = None) -> Sequence[memoryview]:
    """``read_view`` of each block, or a part; of a flat pool without a call for each. Raises as ``BlockViews`` does."""
    if is_flat(memory):
        return flat_views(memory, block_ids, part)
    start, end = block_span(memory.layout.block_bytes, part)
    return [memory.read_view(int(block_id))[start:end] for block_id in block_ids]


def write_views(
    memory: KVMemory, block_ids: Sequence[int], part: BlockPart | None = None
) -> Sequence[memoryview]:
    """``write_view`` of each block, or a part; of a flat pool without a call for each. Raises as ``BlockViews`` does."""
    if is_flat(memory):
        return BlockViews(memory.pool_view, memory.layout.block_bytes, block_ids, part)
    start, end = block_span(memory.layout.block_bytes, part)
    return [memory.write_view(block_id)[start:end] for block_id in block_ids]


def bytes_of_each(views: Sequence[memoryview]) -> int:
    """Of views that have one size, and are one at least."""
    return views.view_bytes if isinstance(views, BlockViews) else views[0].nbytes


def check_sizes(views: Sequence[memoryview], num_bytes: int, who: str) -> None:
    """Raise TransferError unless so many bytes, which ``who`` has in what is read of a block, fit each view."""
    sizes = {views.view_bytes} if isinstance(views, BlockViews) else {view.nbytes for view in views}
    if sizes - {num_bytes}:
        raise TransferError(f"a block of {who} has {num_bytes} bytes, not {min(sizes - {num_bytes})}")


class StaleLeaseError(TransferError):
    """The lease is over or was never given: nothing of the read may be used."""


class ReadStoppedError(TransferError):
    """The read was told to stop, and is terminal."""


def may_heal(error: KvbatonError) -> bool:
    """Another read of the same blocks, or one over another transport, may succeed: the lease may be valid yet."""
    is_over = isinstance(error, (StaleLeaseError, ReadStoppedError))
    return isinstance(error, (TransferError, WorkerLostError)) and not is_over


class LeaseName(msgspec.Struct, frozen=True):
    """Which lease: a transfer, its attempt, and a token that no other lease ever had."""

    transfer_id: str
    attempt: int
    lease: str


class RangeGrant(msgspec.Struct, frozen=True):
    """What the sender's transports handed out with the blocks ``first_block``... of a transfer.

    by_transport: bytes that only the transport of that name understands; it reads the blocks by them without asking.
    rank: whose transports they are, where the sender has several ranks.
    """

    first_block: Annotated[int, msgspec.Meta(ge=0)]
    num_blocks: Annotated[int, msgspec.Meta(ge=1)]
    by_transport: dict[str, Annotated[bytes, msgspec.Meta(max_length=MAX_GRANT_BYTES)]]
    rank: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def end_block(self) -> int:
        """The first block behind the range."""
        return self.first_block + self.num_blocks


def grants_within(grants: Iterable[RangeGrant], first_block: int, end_block: int) -> list[RangeGrant]:
    """Those of ranges that have a block in ``first_block``..``end_block`` - 1."""
    return [grant for grant in grants if grant.first_block < end_block and first_block < grant.end_block]


class ReadRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The blocks ``first_block``..``end_block`` - 1 of a lease, by their index in it.

    grants: of the ranges that these blocks are in, in order and without a gap; they are not said to the sender.
    part: of each of the blocks; None is all of it.
    """

    name: LeaseName
    first_block: Annotated[int, msgspec.Meta(ge=0)]
    num_blocks: Annotated[int, msgspec.Meta(ge=1)]
    grants: tuple[RangeGrant, ...] = ()
    part: BlockPart | None = None

    @property
    def end_block(self) -> int:
        """The first block behind these."""
        return self.first_block + self.num_blocks

    def pieces(self, num_bytes: int) -> Iterator[tuple[int, "ReadRequest"]]:
        """(how many blocks before it, request) of at most MAX_PIECE_BYTES (at least one block) each.

        num_bytes: what is read of each block.
        """
        step = blocks_per_piece(num_bytes)
        for start in range(0, self.num_blocks, step):
            size = min(step, self.num_blocks - start)
            yield start, ReadRequest(self.name, self.first_block + start, size, part=self.part)

    def within(self, num_lent: int, base: int = 0) -> slice:
        """Where these blocks stand among ``num_lent`` that are lent, of which the first is block ``base``.

        Raises StaleLeaseError.
        """
        start, end = self.first_block - base, self.end_block - base
        if start < 0 or end > num_lent:
            outside = self.first_block if start < 0 else max(self.first_block, base + num_lent)
            raise StaleLeaseError(
                f"block {outside} of transfer {self.name.transfer_id} is not readable; {num_lent} blocks are"
            )
        return slice(start, end)


@dataclass(frozen=True)
class Source:
    """Where a peer's blocks can be read, as agreed on the control link.

    token: proves the link to the peer's sender. transport: the name of the one that was chosen; address is its own.
    other_addresses: of the peer's ranks from 1 on, where it has several; a transport reads from one rank (``of_rank``).
    """

    worker_id: str
    boot_id: str
    address: str
    token: str
    transport: str = "tcp"
    other_addresses: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """How many ranks the peer has."""
        return 1 + len(self.other_addresses)

    def of_rank(self, rank: int) -> "Source":
        """Where the blocks of one of the peer's ranks can be read."""
        if not self.other_addresses:
            return self
        address = (self.address, *self.other_addresses)[rank]
        boot_id = rank_boot_id(self.boot_id, rank, self.num_ranks)
        return replace(self, address=address, boot_id=boot_id, other_addresses=())


def rank_boot_id(boot_id: str, rank: int, num_ranks: int) -> str:
    """What the transports of one rank call their process: names that they make of it are not another rank's."""
    return boot_id if num_ranks == 1 else f"{boot_id}.{rank}"


class Read:
    """One fetch's reads, which any thread may stop. Once stopped it stays stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._interrupt: Callable[[], None] | None = None
        self._on_landed: Callable[[int], None] | None = None
        self._on_stop: list[Callable[[], None]] = []
        self.is_stopped = False

    def stop(self) -> None:
        """Make the read terminal soon. Does not block."""
        with self._lock:
            self.is_stopped = True
            if self._interrupt is not None:
                self._interrupt()
            told, self._on_stop = self._on_stop, []
        for callback in told:
            callback()

    def when_stopped(self, callback: Callable[[], None]) -> None:
        """Have the first ``stop`` call ``callback`` (which must not block); at once where that has been."""
        with self._lock:
            if not self.is_stopped:
                self._on_stop.append(callback)
                return
        callback()

    def check(self) -> None:
        """Raise ReadStoppedError after ``stop``."""
        if self.is_stopped:
            raise ReadStoppedError("the read was stopped")

    @contextmanager
    def interruptible(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """Within, ``stop`` calls ``interrupt`` (which must not block). Raises ReadStoppedError if stopped before."""
        with self._lock:
            self.check()
            self._interrupt = interrupt
        try:
            yield
        finally:
            with self._lock:
                self._interrupt = None

    @property
    def is_followed(self) -> bool:
        """Somebody wants to hear how far it has come."""
        return self._on_landed is not None

    def landed(self, num_blocks: int) -> None:
        """Called by a transport, in the thread that fetches: the request's first ``num_blocks`` have their bytes.

        They are not written to any more; whether the lease was valid is told by the end of the read. Raises TransferError
        when they are not what they should be: the transport must end the read. To say nothing is allowed.
        """
        if self._on_landed is not None:
            self._on_landed(num_blocks)

    @contextmanager
    def telling(self, on_landed: Callable[[int], None]) -> Iterator[None]:
        """Within, in this thread, ``on_landed`` hears what a transport says by ``landed``; nobody else does."""
        before, self._on_landed = self._on_landed, on_landed
        try:
            yield
        finally:
            self._on_landed = before


class SenderTransport(Protocol):
    """Lends blocks of this process's pool. Thread-safe."""

    address: str

    def start(self, memory: KVMemory) -> None:
        """The pool that every lease lends from; called once, before ``publish``."""

    def publish(self, name: LeaseName, block_ids: Sequence[int]) -> bytes | None:
        """Append ``block_ids`` to the blocks that may be read under this lease.

        Returns what a receiver reads them by without asking (at most MAX_GRANT_BYTES, see ``RangeGrant``), or None.
        """

    def release(self, name: LeaseName) -> None:
        """Start no more reads of this lease, end running ones; ``on_idle(name)`` once per call when none runs."""

    def close(self) -> None:
        """End all reads and stop every thread. Idempotent."""


class ReceiverTransport(Protocol):
    """Reads blocks of other processes' pools. Thread-safe: one thread at a time fetches from one source."""

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Fill ``views[i]`` with the block ``request.first_block + i``; terminal when it returns or raises.

        Raises ReadStoppedError after ``read.stop()``, StaleLeaseError when the lease is over, TransferError else.
        """

    def forget(self, source: Source) -> None:
        """The link to this source is gone: keep nothing of it. A read that runs ends first, or fails."""

    def close(self) -> None:
        """Close every connection; a read that runs fails. Idempotent."""


@dataclass(frozen=True)
class Transport:
    """Both roles of one transport."""

    sender: SenderTransport
    receiver: ReceiverTransport
