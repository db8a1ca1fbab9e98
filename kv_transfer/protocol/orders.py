"""What the control half orders from the data half. ``TransferMetadata`` is plain data: it may cross processes."""

from typing import Any

import msgspec
from msgspec.structs import replace

from contract.errors import InternalError
from kv_transfer.protocol.digests import RunningDigests, Share
from kv_transfer.protocol.plan import TransferPlan
from kv_transfer.protocol.reads import BlockPart, LeaseName, RangeGrant, Read, Source


class PublishOrder(msgspec.Struct, frozen=True):
    """After the forward pass: digest these blocks of a lease, then make them readable.

    first_block: index of ``block_ids[0]`` in the transfer. seeds: what each block's digest is seeded with. num_parts: into
    how many groups of layers the forward pass is cut, which are made readable while it runs; 1: none is. tells_end: nothing
    follows, and the receiver wants to know when to expect the end.
    """

    key: str
    name: LeaseName
    first_block: int
    block_ids: list[int]
    seeds: list[int]
    num_parts: int = 1
    tells_end: bool = False


class TransferMetadata(msgspec.Struct, frozen=True):
    """One step's orders to the ranks."""

    orders: list[PublishOrder]


class Conversion(msgspec.Struct, frozen=True):
    """The blocks ``first_block``..``end_block`` - 1 of a prompt of ``num_tokens``, by our count, come out of others.

    our_rank: whose share of the heads is made.
    """

    plan: TransferPlan
    first_block: int
    end_block: int
    num_tokens: int
    our_rank: int = 0

    def sources_of(self, our_first: int, our_end: int) -> range:
        """Which of their blocks these come out of."""
        return self.plan.source_blocks(our_first, our_end, self.num_tokens)

    @property
    def source_bytes(self) -> int:
        """Bytes of one of their blocks, of all ranks that are read."""
        return self.plan.theirs.layout.block_bytes * len(self.plan.ranks_of(self.our_rank))

    def in_rank(self, our_rank: int) -> "Conversion":
        """The same for another rank of ours."""
        return replace(self, our_rank=our_rank)


class Ahead(msgspec.Struct):
    """What was read of the blocks ``first_block``..``end_block`` - 1 before they were announced: their first bytes.

    num_read: bytes of each block that have arrived. digests: of these bytes. has_failed: nothing of it is used any more.
    But for the blocks, all of it is written and read in the pull thread of one source alone.
    """

    first_block: int
    end_block: int
    digests: RunningDigests
    num_read: int = 0
    has_failed: bool = False

    def goes_on_with(self, first_block: int, num_blocks: int, start_byte: int) -> bool:
        """A read of these blocks from there on takes up where the one before it ended."""
        is_same = (first_block, first_block + num_blocks) == (self.first_block, self.end_block)
        return is_same and start_byte == self.num_read and not self.has_failed

    def has_all(self, block_bytes: int) -> bool:
        """Nothing is left to be read."""
        return self.num_read == block_bytes and not self.has_failed

    @property
    def is_of_use(self) -> bool:
        """The rest of the blocks is all that is still to be read."""
        return self.num_read > 0 and not self.has_failed


class PullJob(msgspec.Struct, frozen=True, tag=True):
    """Read blocks ``first_block``... of a peer's lease, verify them, and have them in ``block_ids``.

    first_block, digests, seeds, grants: by the sender's blocks. conversion: None where those are ours, one for one.
    digests: of the sender's rank ``rank``; others: of further ranks that are read. grants: of all of them. ahead: what of
    these blocks is here already; is_here: all of it, and no read of it is open: verify only. part: read this part ahead of
    the digests, which are empty, and verify nothing.
    """

    key: str
    source: Source
    name: LeaseName
    first_block: int
    block_ids: tuple[int, ...]
    digests: tuple[int, ...]
    seeds: tuple[int, ...]
    read: Read
    conversion: Conversion | None = None
    grants: tuple[RangeGrant, ...] = ()
    others: tuple[Share, ...] = ()
    rank: int = 0
    ahead: Ahead | None = None
    part: BlockPart | None = None
    is_here: bool = False

    @property
    def shares(self) -> list[Share]:
        """What is read of each rank of the sender's, in order."""
        return [Share(self.rank, self.digests), *self.others]

    def in_rank(self, our_rank: int) -> "PullJob":
        """What our rank of several has to read of it: its own share of the heads."""
        conversion = self.conversion
        ranks = [our_rank]
        if conversion is not None:
            conversion = conversion.in_rank(our_rank)
            ranks = conversion.plan.ranks_of(our_rank)
        first, *others = [share for share in self.shares if share.rank in ranks]
        grants = tuple(grant for grant in self.grants if grant.rank in ranks)
        return replace(
            self,
            digests=first.digests,
            conversion=conversion,
            grants=grants,
            others=tuple(others),
            rank=first.rank,
        )


class CommitJob(msgspec.Struct, frozen=True, tag=True):
    """Make verified blocks visible to the device."""

    key: str
    block_ids: tuple[int, ...]
    read: Read


def orders_of(metadata: Any) -> list[PublishOrder]:
    """Return the orders in what the scheduler's half made for a step. Raises InternalError for anything else."""
    if not isinstance(metadata, TransferMetadata):
        raise InternalError(f"orders of type {type(metadata).__name__}; they must be TransferMetadata")
    return metadata.orders
