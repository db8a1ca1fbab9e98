"""The orders of the control half to the data half. ``TransferMetadata`` is plain data: it may cross processes."""

from typing import Any

import msgspec
from msgspec.structs import replace

from contract.errors import InternalError, TransferError
from kv_transfer.protocol.digests import RunningDigests, Share
from kv_transfer.protocol.plan import TransferPlan
from kv_transfer.protocol.reads import BlockPart, LeaseName, RangeGrant, Read, ReadRequest, Source


class PublishOrder(msgspec.Struct, frozen=True):
    """Digest these blocks of a lease after the forward pass, then make them readable.

    first_block: index of ``block_ids[0]`` in the transfer. seeds: of the blocks' digests. num_parts: number of groups of
    layers that are made readable one by one while the pass runs; 1: all at its end. announces_end: this is the last range,
    and the receiver should get an estimate of when it will be complete. is_computed: the pass computes none of the blocks,
    which are published before it. group: of layers, in which all of them are. num_tokens: those that the states have to have
    absorbed if the blocks are pieces of a slot; 0 for blocks of KV.
    """

    key: str
    name: LeaseName
    first_block: int
    block_ids: list[int]
    seeds: list[int]
    num_parts: int = 1
    announces_end: bool = False
    is_computed: bool = False
    group: int = 0
    num_tokens: int = 0

    @property
    def end_block(self) -> int:
        """The first block of the transfer behind these."""
        return self.first_block + len(self.block_ids)


class TransferMetadata(msgspec.Struct, frozen=True):
    """The orders of one step to the ranks."""

    orders: list[PublishOrder]


class Conversion(msgspec.Struct, frozen=True):
    """Blocks of ours that are made from the sender's: ``first_block``..``end_block`` - 1 of a prompt of ``num_tokens``.

    our_rank: the rank whose share of the heads is made. offset: the number in the transfer of a sender's block, less its
    place in the prompt.
    """

    plan: TransferPlan
    first_block: int
    end_block: int
    num_tokens: int
    our_rank: int = 0
    offset: int = 0

    @property
    def source_bytes(self) -> int:
        """Bytes of one of the sender's blocks, over all ranks that are read."""
        return self.plan.theirs.layout.block_bytes * len(self.plan.ranks_of(self.our_rank))


class Ahead(msgspec.Struct):
    """The first bytes of the blocks ``first_block``..``end_block`` - 1, read before the blocks were announced.

    num_read: bytes of each block that have arrived. digests: of the first ``num_digested`` of these: those that a library
    put on a device are digested there once all have arrived. has_failed: nothing of it is used any more.
    All but the blocks' numbers is written and read by the pull thread of one source alone.
    """

    first_block: int
    end_block: int
    digests: RunningDigests
    num_read: int = 0
    num_digested: int = 0
    has_failed: bool = False

    def goes_on_with(self, first_block: int, num_blocks: int, start_byte: int) -> bool:
        """Return whether a read of these blocks from ``start_byte`` on continues the one before it."""
        is_same = (first_block, first_block + num_blocks) == (self.first_block, self.end_block)
        return is_same and start_byte == self.num_read and not self.has_failed

    def note_read(self, num_bytes: int, *, is_digested: bool) -> None:
        """Record that so many further bytes of each block have arrived."""
        self.num_read += num_bytes
        if is_digested:
            self.num_digested = self.num_read

    @property
    def undigested(self) -> BlockPart | None:
        """The part that has arrived and is not digested."""
        num_bytes = self.num_read - self.num_digested
        return BlockPart(self.num_digested, num_bytes) if num_bytes else None

    def check_digested(self) -> None:
        """Raise TransferError unless all that has arrived is digested, so that the next bytes may be."""
        if self.undigested is not None:
            raise TransferError("the part before this one is not digested yet")

    def up_to(self, part: BlockPart) -> BlockPart:
        """Return the part from the first byte that was not read to the end of ``part``, which does not begin before."""
        end = part.start_byte + part.num_bytes
        return BlockPart(self.num_read, end - self.num_read) if part.start_byte > self.num_read else part

    def has_all(self, block_bytes: int) -> bool:
        """Return True if nothing is left to be read or digested."""
        return self.num_digested == block_bytes and not self.has_failed

    @property
    def is_of_use(self) -> bool:
        """True if only the rest of the blocks must still be read."""
        return self.num_read > 0 and not self.has_failed


class PullJob(msgspec.Struct, frozen=True, tag=True):
    """Read blocks ``first_block``... of a peer's lease into ``block_ids``, and verify them.

    first_block, shares, seeds, grants: by the sender's blocks. conversion: None if those are ours, one for one.
    shares: the digests of each rank of the sender that is read, in order. grants: of all of them. ahead: the part of these
    blocks that was read before; is_here: it is all of them, and no read of it is open: verify only. part: read this part
    ahead of the digests, which are not there yet, and verify nothing. group: of layers, in which all blocks are.
    """

    key: str
    source: Source
    name: LeaseName
    first_block: int
    block_ids: tuple[int, ...]
    shares: tuple[Share, ...]
    seeds: tuple[int, ...]
    read: Read
    conversion: Conversion | None = None
    grants: tuple[RangeGrant, ...] = ()
    ahead: Ahead | None = None
    part: BlockPart | None = None
    is_here: bool = False
    group: int = 0

    @property
    def only_request(self) -> ReadRequest | None:
        """The request of the only fetch that the job makes; None if it makes several, or decides that when it begins."""
        if self.conversion is not None or self.ahead is not None or self.part is not None:
            return None
        return ReadRequest(self.name, self.first_block, len(self.block_ids), group=self.group)

    def in_rank(self, our_rank: int) -> "PullJob":
        """Return what one of our ranks has to read: its own share of the heads."""
        conversion = self.conversion
        ranks = [our_rank]
        if conversion is not None:
            conversion = replace(conversion, our_rank=our_rank)
            ranks = conversion.plan.ranks_of(our_rank)
        shares = tuple(share for share in self.shares if share.rank in ranks)
        grants = tuple(grant for grant in self.grants if grant.rank in ranks)
        return replace(self, shares=shares, conversion=conversion, grants=grants)


class ReceivedStates(msgspec.Struct, frozen=True):
    """The pieces of a slot that has received the states behind ``num_tokens`` tokens. group: its number."""

    group: int
    pieces: tuple[int, ...]
    num_tokens: int


class CommitJob(msgspec.Struct, frozen=True, tag=True):
    """Make verified blocks visible to the device. states: None without recurrent layers."""

    key: str
    block_ids: tuple[int, ...]
    read: Read
    states: ReceivedStates | None = None


def orders_of(metadata: Any) -> list[PublishOrder]:
    """Return the orders in a step's metadata. Raises InternalError for metadata of another type."""
    if not isinstance(metadata, TransferMetadata):
        raise InternalError(f"orders of type {type(metadata).__name__}; they must be TransferMetadata")
    return metadata.orders
