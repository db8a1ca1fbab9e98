"""The plan by which a peer's blocks become ours if the two sides cut the KV differently. No bytes, no I/O.

A plan is made once per peer pair, at the handshake. *Their* blocks are the sender's, *our* blocks the receiver's. Both
sides number a transfer's blocks from 0 at the prompt's first token; those of a further group of layers come behind those
of the one before, from the first block that is handed over of it (``Section``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from contract.errors import TransferError
from contract.layout import Side, heads_of_rank, received_fingerprint
from kv_transfer.protocol.digests import Share


@dataclass(frozen=True)
class Run:
    """``count`` tokens that are in one block on each side, or heads that are in one rank; the offsets count within it."""

    theirs: int
    their_offset: int
    ours: int
    our_offset: int
    count: int


@dataclass(frozen=True)
class TransferPlan:
    """Maps the blocks of any prompt on their side to those on ours. Both sides fit: ``KVLayout.differences`` is empty.

    first_token: the first one that is handed over, where a block of theirs begins. Of a group of layers with a window it is
    not the prompt's first one, and may be amid the first of our blocks, of which no later token sees what is missing.
    """

    ours: Side
    theirs: Side
    first_token: int = field(default=0, kw_only=True)

    @cached_property
    def is_direct(self) -> bool:
        """True if their blocks equal ours byte by byte (rank by rank), so that they are read straight into the pool."""
        return self.ours == self.theirs

    @cached_property
    def groups(self) -> "tuple[TransferPlan, ...]":
        """The plan of each group of layers; this one if each layer keeps all tokens."""
        pairs = zip(self.ours.groups, self.theirs.groups, strict=True)
        return tuple(TransferPlan(ours, theirs) for ours, theirs in pairs)

    def sections(self, num_tokens: int) -> "tuple[Section, ...]":
        """Return where the blocks of each group are in the transfer of a prompt."""
        sections = []
        first = their_first = 0
        ours = self.ours.places_to_send(num_tokens)
        theirs = self.theirs.places_to_send(num_tokens)
        for group, (plan, places, their_places) in enumerate(zip(self.groups, ours, theirs, strict=True)):
            is_state = group == self.ours.state_group
            # Pieces of a slot are counted as blocks of one token.
            length = len(places) if is_state else num_tokens
            if their_places.start and not plan.is_direct:
                plan = replace(plan, first_token=their_places.start * plan.theirs.layout.block_size)
            sections.append(Section(group, plan, places, first, their_places, their_first, length, is_state))
            first += len(places)
            their_first += len(their_places)
        return tuple(sections)

    def describe(self) -> str:
        """Describe what is converted, as "block_size 16 → 32, dtype bfloat16 → float32"; empty for a direct plan."""
        ours = self.ours.layout
        theirs = self.theirs.layout
        changes = [
            ("block_size", theirs.block_size, ours.block_size),
            ("dtype", theirs.dtype, ours.dtype),
            ("ranks", self.theirs.num_ranks, self.ours.num_ranks),
        ]
        return ", ".join(f"{name} {old} → {new}" for name, old, new in changes if old != new)

    def source_blocks(self, our_first: int, our_end: int, num_tokens: int) -> range:
        """Return their blocks with tokens of our blocks ``our_first``..``our_end`` - 1 of a prompt of ``num_tokens``."""
        ours = self.ours.layout.block_size
        theirs = self.theirs.layout.block_size
        first = max(our_first * ours, self.first_token)
        end = min(our_end * ours, num_tokens)
        return range(first // theirs, -(-end // theirs))

    def num_covered(self, num_their_blocks: int, num_tokens: int) -> int:
        """Return how many of our first blocks are within their first ``num_their_blocks``."""
        covered = num_their_blocks * self.theirs.layout.block_size
        if covered >= num_tokens:
            return self.ours.num_blocks(num_tokens)
        return covered // self.ours.layout.block_size

    def pieces(self, our_first: int, our_end: int, max_source_blocks: int) -> Iterator[tuple[int, int]]:
        """Cut our blocks into (first, end) that need at most so many of theirs each, or are one block of ours.

        If our blocks are the smaller ones, no two pieces need the same block of theirs.
        """
        ours = self.ours.layout.block_size
        theirs = self.theirs.layout.block_size
        while our_first < our_end:
            limit = (our_first * ours // theirs + max(1, max_source_blocks)) * theirs // ours
            end = min(our_end, max(limit, our_first + 1))
            yield our_first, end
            our_first = end

    def token_runs(self, our_first: int, our_end: int, num_tokens: int) -> Iterator[Run]:
        """Yield all tokens of these blocks of ours, in order, from ``first_token`` up to the prompt's end."""
        ours = self.ours.layout.block_size
        end = min(our_end * ours, num_tokens)
        return _runs(max(our_first * ours, self.first_token), end, ours, self.theirs.layout.block_size)

    def num_missing(self, our_first: int) -> int:
        """Return how many tokens of a block of ours, from its first one on, are not handed over."""
        return max(0, self.first_token - our_first * self.ours.layout.block_size)

    def head_runs(self, our_rank: int = 0) -> Iterator[Run]:
        """Yield the heads of our rank, in order; of several ranks of theirs with a head, one is read."""
        first = self.ours.heads(our_rank).start
        for their_rank, heads in head_sources(
            self.ours.num_kv_heads, self.ours.num_ranks, our_rank, self.theirs.num_ranks
        ):
            their_offset = heads.start - self.theirs.heads(their_rank).start
            yield Run(their_rank, their_offset, our_rank, heads.start - first, len(heads))

    def ranks_of(self, our_rank: int = 0) -> list[int]:
        """Return the peer's ranks that our rank reads from, in order."""
        return [run.theirs for run in self.head_runs(our_rank)]

    @cached_property
    def read_ranks(self) -> frozenset[int]:
        """The peer's ranks that a rank of ours reads from: not those of which all heads are read from others."""
        return frozenset(
            theirs for our_rank in range(self.ours.num_ranks) for theirs in self.ranks_of(our_rank)
        )

    @cached_property
    def crossing_bytes(self) -> int:
        """Bytes that cross for one of their blocks: a rank of ours reads their rank's whole block, to verify it, or none."""
        num_reads = sum(len(self.ranks_of(our_rank)) for our_rank in range(self.ours.num_ranks))
        return num_reads * self.theirs.layout.block_bytes


@dataclass(frozen=True)
class Section:
    """The blocks of one group of layers in a transfer. Places count from the prompt's first token, numbers in the transfer.

    places, their_places: those that are handed over. first, their_first: the number of the first of them. num_tokens: of the
    prompt. is_state: they are the pieces of a slot of states, which are those of the whole prompt, so that no cache has any.
    """

    group: int
    plan: TransferPlan
    places: range
    first: int
    their_places: range
    their_first: int
    num_tokens: int
    is_state: bool = False

    @property
    def end(self) -> int:
        """The number of the first block behind ours."""
        return self.first + len(self.places)

    def missing(self, num_cached: int) -> tuple[int, int]:
        """Return (number of the first block that is to be read, end). num_cached: blocks before this place are cached."""
        if self.is_state:
            return self.first, self.end
        return self.first + max(0, num_cached - self.places.start), self.end

    def num_covered(self, num_their_blocks: int) -> int:
        """Return how many of our first blocks are within the sender's first ``num_their_blocks`` of the transfer."""
        num_theirs = num_their_blocks - self.their_first
        if num_theirs >= len(self.their_places):
            return len(self.places)
        covered = (
            self.plan.num_covered(self.their_places.start + num_theirs, self.num_tokens)
            if num_theirs > 0
            else 0
        )
        return max(0, covered - self.places.start)


def head_sources(
    num_kv_heads: int, num_ours: int, our_rank: int, num_theirs: int
) -> Iterator[tuple[int, range]]:
    """Yield (their rank, heads) from which our rank reads its KV heads, in order: from as few ranks as possible.

    num_ours, num_theirs: ranks. If several of their ranks hold the same heads, the one whose position corresponds to our
    rank is read; with equal numbers of ranks each rank reads its counterpart.
    """
    each_rank = [heads_of_rank(num_kv_heads, num_theirs, rank) for rank in range(num_theirs)]
    beside = our_rank * num_theirs // num_ours
    heads = heads_of_rank(num_kv_heads, num_ours, our_rank)
    while heads:
        holders = [rank for rank, held in enumerate(each_rank) if heads.start in held]
        chosen = max(holders, key=lambda rank: (each_rank[rank].stop, -abs(rank - beside)))
        end = min(heads.stop, each_rank[chosen].stop)
        yield chosen, range(heads.start, end)
        heads = range(end, heads.stop)


def _runs(start: int, end: int, our_size: int, their_size: int) -> Iterator[Run]:
    """Cut the tokens ``start``..``end`` - 1 wherever a block of ours, of ``our_size`` tokens, or of theirs ends."""
    while start < end:
        ours, our_offset = divmod(start, our_size)
        theirs, their_offset = divmod(start, their_size)
        count = min(our_size - our_offset, their_size - their_offset, end - start)
        yield Run(theirs, their_offset, ours, our_offset, count)
        start += count


@dataclass(frozen=True)
class PeerTerms:
    """The terms of a link between sides that differ, or have several ranks.

    model_fingerprint: the peer's, which its digests are seeded with. kv_fingerprint: what hashes of its KV start from
    here; None if it is the KV that would be computed here.
    """

    plan: TransferPlan
    model_fingerprint: str
    kv_fingerprint: str | None


def terms_between(ours: Side, our_fingerprint: str, theirs: Side, their_fingerprint: str) -> PeerTerms | None:
    """Return the terms with a compatible peer; None if nothing differs and each side is one rank."""
    plan = TransferPlan(ours, theirs)
    if plan.is_direct and ours.num_ranks == 1 and our_fingerprint == their_fingerprint:
        return None
    their_kv = f"{their_fingerprint}/{theirs.layout.dtype}"
    is_computed_alike = their_kv == f"{our_fingerprint}/{ours.layout.dtype}"
    kv_fingerprint = None if is_computed_alike else received_fingerprint(our_fingerprint, their_kv)
    return PeerTerms(plan, their_fingerprint, kv_fingerprint)


class AnnouncedBlocks:
    """Owns the digests that the sender announced, by its blocks and ranks. Not thread-safe.

    seeds: one per block that the transfer has on the sender's side. sections: see ``Section``.
    """

    def __init__(self, terms: PeerTerms, num_tokens: int, seeds: Sequence[int]) -> None:
        self.terms = terms
        self.plan = terms.plan
        self.num_tokens = num_tokens
        self.sections = terms.plan.sections(num_tokens)
        self._seeds = tuple(seeds)
        self._digests: list[list[int]] = [[] for _ in range(self.plan.theirs.num_ranks)]

    def add(self, first_block: int, digests: Sequence[int], others: Sequence[Sequence[int]] = ()) -> range:
        """Add announced blocks; return the blocks of ours that are complete now, maybe none.

        others: the digests of the sender's ranks from 1 on. Raises TransferError for blocks that do not follow those
        announced before, or that the prompt does not have, or if digests of a rank are missing.
        """
        known = len(self._digests[0])
        total = len(self._seeds)
        if first_block != known or not digests or known + len(digests) > total:
            raise TransferError(
                f"the sender announced {len(digests)} blocks from {first_block}; {known} of {total} were announced"
            )
        by_rank = [digests, *others]
        if [len(each) for each in by_rank] != [len(digests)] * len(self._digests):
            raise TransferError(
                f"the sender announced {len(digests)} blocks of rank 0, and not as many of each other rank:"
                f" it has {self.plan.theirs.num_ranks} ranks"
            )
        before = self._num_covered(known)
        for announced, each in zip(self._digests, by_rank, strict=True):
            announced.extend(each)
        return range(before, self._num_covered(known + len(digests)))

    def check_end(self, num_blocks: int) -> None:
        """Raise TransferError unless the transfer has ``num_blocks`` blocks and all were announced."""
        known = len(self._digests[0])
        if not num_blocks == len(self._seeds) == known:
            raise TransferError(
                f"the sender ended with {num_blocks} blocks, {known} announced;"
                f" the prompt has {len(self._seeds)} blocks there"
            )

    @property
    def lacks_heads(self) -> bool:
        """True if the first block of a group of ours arrives without its first tokens."""
        return any(section.plan.num_missing(section.places.start) for section in self.sections)

    def section_of(self, our_first: int) -> Section:
        """Return the section of a block of ours."""
        return next(section for section in self.sections if our_first < section.end)

    def sources_of(self, our_first: int, our_end: int) -> tuple[range, tuple[int, ...], tuple[Share, ...]]:
        """Return the sender's blocks to read for these blocks of ours, which are complete and of one group.

        And their seeds and digests: those of the ranks that are read.
        """
        section = self.section_of(our_first)
        to_place = section.places.start - section.first
        places = section.plan.source_blocks(our_first + to_place, our_end + to_place, section.num_tokens)
        to_number = section.their_first - section.their_places.start
        blocks = range(places.start + to_number, places.stop + to_number)
        chosen = slice(blocks.start, blocks.stop)
        read = sorted(self.plan.read_ranks)
        shares = tuple(Share(rank, tuple(self._digests[rank][chosen])) for rank in read)
        return blocks, self._seeds[chosen], shares

    def _num_covered(self, num_their_blocks: int) -> int:
        """Return how many of our first blocks are within the sender's first ``num_their_blocks``."""
        return sum(section.num_covered(num_their_blocks) for section in self.sections)
