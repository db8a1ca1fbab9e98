"""What the control half orders from the data half. ``TransferMetadata`` is plain data: it may cross processes."""

from dataclasses import dataclass

import msgspec

from contract.block_hash import all_block_hashes
from contract.requests import EngineRequest
from kv_transfer.plan import TransferPlan
from kv_transfer.transport import LeaseName, RangeGrant, Read, Source


class PublishOrder(msgspec.Struct, frozen=True):
    """After the forward pass: digest these blocks of a lease, then make them readable.

    first_block: index of ``block_ids[0]`` in the transfer. seeds: what each block's digest is seeded with.
    """

    key: str
    name: LeaseName
    first_block: int
    block_ids: list[int]
    seeds: list[int]


class TransferMetadata(msgspec.Struct, frozen=True):
    """One step's orders to the ranks (B19)."""

    orders: list[PublishOrder]


@dataclass(frozen=True)
class Conversion:
    """The blocks ``first_block``..``end_block`` - 1 of a prompt of ``num_tokens``, by our count, come out of others."""

    plan: TransferPlan
    first_block: int
    end_block: int
    num_tokens: int

    def sources_of(self, our_first: int, our_end: int) -> range:
        """Which of their blocks these come out of."""
        return self.plan.source_blocks(our_first, our_end, self.num_tokens)


@dataclass(frozen=True)
class PullJob:
    """Read blocks ``first_block``... of a peer's lease, verify them, and have them in ``block_ids``.

    first_block, digests, seeds, grants: by the sender's blocks. conversion: None where those are ours, one for one.
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


@dataclass(frozen=True)
class CommitJob:
    """Make verified blocks visible to the device."""

    key: str
    block_ids: tuple[int, ...]
    read: Read


def digest_seeds(request: EngineRequest, model_fingerprint: str, block_size: int) -> list[int]:
    """One seed per block of the prompt, from the block's canonical hash: right bytes of a wrong prompt fail too."""
    hashes = all_block_hashes(request.hash_root(model_fingerprint), request.prompt_token_ids, block_size)
    return [int.from_bytes(block_hash[:8], "little") for block_hash in hashes]
