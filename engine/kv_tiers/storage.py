"""The interface between the scheduler and the storage of one KV tier, and its access to the pool's blocks.

A tier keeps copies of full blocks in numbered slots. The scheduler decides what is in which slot; the storage copies bytes
in a thread of its own, and keeps a digest of each slot. A block is bytes to it: it depends on nothing but their number.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, Protocol

import xxhash

from contract.block_hash import BlockHash
from contract.errors import InternalError
from engine.connector import KVMemory

# A batch of blocks on a device is copied in parts of this size.
_MAX_PINNED_BYTES = 64 * 2**20


class BlockCopy(NamedTuple):
    """A copy of one block between the pool and a slot of a tier. block_hash: the hash of the block's content.

    num_tokens: of a piece of the states of recurrent layers, how many tokens these have absorbed.
    """

    block_id: int
    slot: int
    block_hash: BlockHash
    num_tokens: int = 0


class RankPlace(NamedTuple):
    """A rank among those of its engine."""

    rank: int
    num_ranks: int


ALONE = RankPlace(0, 1)


class TierStorage(Protocol):
    """The bytes of one tier. Called from the step thread; no call waits for a copy but ``settle`` and ``close``."""

    @property
    def name(self) -> str:
        """Another one for each storage of an engine."""

    @property
    def kind(self) -> str:
        """The tier's name in metrics: the storages of all groups of layers are one tier."""

    @property
    def group(self) -> int:
        """The number of the group of layers whose blocks it keeps."""

    @property
    def num_slots(self) -> int:
        """Blocks that the tier can keep."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block."""

    @property
    def found(self) -> Sequence[tuple[BlockHash, int]]:
        """The content of slots that an earlier engine has left, the least recently stored first."""

    @property
    def outlives_engine(self) -> bool:
        """True if a later engine finds the content."""

    @property
    def is_off(self) -> bool:
        """True if the storage has failed: then it stores and loads nothing any more."""

    @property
    def has_orders(self) -> bool:
        """True while what it was given waits for a step, with which it travels to the ranks, or for ``settle``."""

    def store(self, copies: Sequence[BlockCopy]) -> "Future[int]":
        """Copy blocks from the pool to slots; return how many of them, from the first on, were stored.

        Until the future is done, the blocks are not written to, and the slots are not used otherwise.
        """

    def load(self, copies: Sequence[BlockCopy]) -> "Future[int]":
        """Copy slots to blocks of the pool; return how many of them, from the first on, were intact.

        What the blocks hold from the first damaged one on is not specified. Until the future is done, the blocks are not
        used otherwise, and the slots are not written to. A load that has not begun may be cancelled.
        """

    def forget(self, slots: Sequence[int]) -> None:
        """Let no later engine find what was stored in these slots, which is corrupt or was dropped."""

    def restart(self, model: str | None) -> None:
        """Drop what is stored in all slots, for later engines as well.

        model: the fingerprint of the weights from now on; None: as before.
        """

    def settle(self, timeout_seconds: float | None = None) -> bool:
        """Wait until every copy that was ordered before is over; return False if that takes longer than this time."""

    def close(self) -> None:
        """Wait for the copy that has begun, and free the tier. The pool may be freed afterwards. May be called twice."""


def settle_thread(thread: ThreadPoolExecutor, timeout_seconds: float | None) -> bool:
    """Wait for what a tier's one thread was given before, which it does in order; return False if that takes longer."""
    return not wait([thread.submit(int)], timeout_seconds).not_done


class GroupPlace(NamedTuple):
    """A group of layers among those of an engine. share: of the bytes of a tier; name: none of the first group."""

    number: int = 0
    name: str = ""
    share: float = 1.0


WHOLE = GroupPlace()


def storage_name(kind: str, group: int) -> str:
    """Return the name of the storage of a group in a tier."""
    return f"{kind}/{group}" if group else kind


def digest_of(content: memoryview, block_hash: BlockHash, group: str = "") -> int:
    """Return the digest of a block: ``xxh3_64``, seeded by the hash of its content and its group's name as for transfers.

    So the right bytes of another block are damage too.
    """
    seed = int.from_bytes(block_hash[:8], "little")
    return xxhash.xxh3_64_intdigest(
        content, xxhash.xxh3_64_intdigest(group.encode(), seed) if group else seed
    )


def has_states(memory: KVMemory, copies: Sequence[BlockCopy]) -> bool:
    """Return False for pieces of slots of which one has other states than those behind ``num_tokens``."""
    if memory.states is None:
        return True
    try:
        for copy in copies:
            memory.states.check([copy.block_id], copy.num_tokens)
    except InternalError:
        return False
    return True


def read_blocks(memory: KVMemory, copies: Sequence[BlockCopy]) -> Iterator[tuple[BlockCopy, memoryview]]:
    """Yield the bytes of each block, which are valid until the next ones.

    Of a pool on a device they are copies in pinned memory, made on a side stream.
    """
    device = memory.device_pool
    if device is None:
        for copy in copies:
            yield copy, memory.read_view(copy.block_id)
        return
    num_bytes = memory.layout.block_bytes
    num_rows = max(1, _MAX_PINNED_BYTES // num_bytes)
    for start in range(0, len(copies), num_rows):
        part = copies[start : start + num_rows]
        views = device.begin_reading([copy.block_id for copy in part], 0, num_bytes).views()
        yield from zip(part, views, strict=True)


def load_blocks(
    memory: KVMemory, copies: Sequence[BlockCopy], fill: Callable[[Sequence[memoryview]], int]
) -> int:
    """Have ``fill`` write the bytes of blocks; return the number of intact ones, which it returns, when the pool has them.

    If all pieces of slots are intact, the states that they are now are recorded.
    """
    num_intact = _fill(memory, [copy.block_id for copy in copies], fill)
    if memory.states is not None and num_intact == len(copies):
        for copy in copies:
            memory.states.note_received([copy.block_id], copy.num_tokens)
    return num_intact


def _fill(memory: KVMemory, block_ids: Sequence[int], fill: Callable[[Sequence[memoryview]], int]) -> int:
    """Have ``fill`` write the bytes of blocks.

    The bytes of a pool on a device are written to pinned memory, and copied from there on a side stream.
    """
    if (device := memory.device_pool) is None:
        return fill([memory.write_view(block_id) for block_id in block_ids])
    device.wait_until_unused()  # a step that was launched before may still write to blocks that are free now
    rows = device.host_rows(len(block_ids), memory.layout.block_bytes)
    num_filled = fill([row.view for row in rows])
    device.write_rows(block_ids, 0, rows)
    device.commit(list(block_ids))
    return num_filled
