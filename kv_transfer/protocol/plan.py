"""How KV gets from a peer's blocks into ours when the two sides cut it differently: geometry only, no bytes, no I/O.

A plan is made once per peer pair, at the handshake. *Their* blocks are the sender's, *our* blocks the receiver's. Both
sides number a transfer's blocks from 0 at the prompt's first token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from contract.layout import Side, received_fingerprint


@dataclass(frozen=True)
class HeadRun:
    """``num_heads`` heads from ``their_first`` on in a block of their rank, from ``our_first`` on in our rank's."""

    their_rank: int
    their_first: int
    our_first: int
    num_heads: int


@dataclass(frozen=True)
class TokenRun:
    """``num_tokens`` tokens that lie together on both sides; the offsets count tokens within a block."""

    their_block: int
    their_offset: int
    our_block: int
    our_offset: int
    num_tokens: int


@dataclass(frozen=True)
class TransferPlan:
    """Maps the blocks of any prompt on their side to those on ours. Both sides fit: ``KVLayout.differences`` is empty."""

    ours: Side
    theirs: Side

    @cached_property
    def is_direct(self) -> bool:
        """Their blocks are ours byte by byte (rank by rank), so they are read straight into the pool."""
        return self.ours == self.theirs

    def describe(self) -> str:
        """What is converted, as "block_size 16 → 32, dtype bfloat16 → float32"; empty for a direct plan."""
        ours = self.ours.layout
        theirs = self.theirs.layout
        changes = [
            ("block_size", theirs.block_size, ours.block_size),
            ("dtype", theirs.dtype, ours.dtype),
            ("ranks", self.theirs.num_ranks, self.ours.num_ranks),
        ]
        return ", ".join(f"{name} {old} → {new}" for name, old, new in changes if old != new)

    def source_blocks(self, our_first: int, our_end: int, num_tokens: int) -> range:
        """Which of their blocks hold tokens of our blocks ``our_first``..``our_end`` - 1 of a prompt of ``num_tokens``."""
        ours = self.ours.layout.block_size
        theirs = self.theirs.layout.block_size
        first = our_first * ours
        end = min(our_end * ours, num_tokens)
        return range(first // theirs, -(-end // theirs))

    def num_covered(self, num_their_blocks: int, num_tokens: int) -> int:
        """How many of our first blocks lie within their first ``num_their_blocks``."""
        covered = num_their_blocks * self.theirs.layout.block_size
        if covered >= num_tokens:
            return self.ours.num_blocks(num_tokens)
        return covered // self.ours.layout.block_size

    def pieces(self, our_first: int, our_end: int, max_source_blocks: int) -> Iterator[tuple[int, int]]:
        """Cut our blocks into (first, end) that need at most so many of theirs each, or are one block of ours.

        No block of theirs is needed by two pieces where our blocks are the smaller ones.
        """
        ours = self.ours.layout.block_size
        theirs = self.theirs.layout.block_size
        while our_first < our_end:
            limit = (our_first * ours // theirs + max(1, max_source_blocks)) * theirs // ours
            end = min(our_end, max(limit, our_first + 1))
            yield our_first, end
            our_first = end

    def token_runs(self, our_first: int, our_end: int, num_tokens: int) -> Iterator[TokenRun]:
        """All tokens of these blocks of ours, in order; nothing behind the prompt's end."""
        ours = self.ours.layout.block_size
        theirs = self.theirs.layout.block_size
        token = our_first * ours
        end = min(our_end * ours, num_tokens)
        while token < end:
            (our_block, our_offset) = divmod(token, ours)
            (their_block, their_offset) = divmod(token, theirs)
            count = min(ours - our_offset, theirs - their_offset, end - token)
            yield TokenRun(their_block, their_offset, our_block, our_offset, count)
            token += count

    def head_runs(self, our_rank: int = 0) -> list[HeadRun]:
        """Where the heads of our rank come from, in order; the ranks in it are those that it reads from."""
        head = self.ours.first_head(our_rank)
        runs = []
        end = head + self.ours.layout.num_kv_heads
        while head < end:
            their_rank, their_first = divmod(head, self.theirs.layout.num_kv_heads)
            count = min(self.theirs.layout.num_kv_heads - their_first, end - head)
            runs.append(HeadRun(their_rank, their_first, head - self.ours.first_head(our_rank), count))
            head += count
        return runs

    def ranks_of(self, our_rank: int = 0) -> list[int]:
        """The peer's ranks that our rank reads from, in order."""
        if self.is_direct:
            return [our_rank]
        return [run.their_rank for run in self.head_runs(our_rank)]

    @cached_property
    def crossing_bytes(self) -> int:
        """What crosses for one of their blocks: a rank of ours reads a rank's block whole, to verify it, or not at all."""
        num_reads = sum(len(self.ranks_of(our_rank)) for our_rank in range(self.ours.num_ranks))
        return num_reads * self.theirs.layout.block_bytes


@dataclass(frozen=True)
class PeerTerms:
    """What a link agreed on where the two sides are not alike, or have several ranks.

    model_fingerprint: the peer's, which its digests are seeded with. kv_fingerprint: what hashes of its KV start from
    here; None: it is the KV that would be computed here, cut otherwise at most.
    """

    plan: TransferPlan
    model_fingerprint: str
    kv_fingerprint: str | None


def terms_between(ours: Side, our_fingerprint: str, theirs: Side, their_fingerprint: str) -> PeerTerms | None:
    """The terms of a peer that was found compatible; None where nothing differs and each side is one rank."""
    plan = TransferPlan(ours, theirs)
    if plan.is_direct and ours.num_ranks == 1 and our_fingerprint == their_fingerprint:
        return None
    their_kv = f"{their_fingerprint}/{theirs.layout.dtype}"
    is_computed_alike = their_kv == f"{our_fingerprint}/{ours.layout.dtype}"
    kv_fingerprint = None if is_computed_alike else received_fingerprint(our_fingerprint, their_kv)
    return PeerTerms(plan, their_fingerprint, kv_fingerprint)
