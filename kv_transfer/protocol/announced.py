"""What a sender's words mean for the receiver's blocks, also where it cuts the prompt otherwise or has several ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

from contract.errors import ErrorKind, TransferError
from contract.requests import EngineRequest
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import messages as msg
from kv_transfer.protocol.digests import Share, digest_seeds
from kv_transfer.protocol.plan import PeerTerms, TransferPlan
from kv_transfer.protocol.states import NOT_NEEDED


@dataclass(frozen=True)
class SourceRange:
    """Consecutive blocks of the sender's, from ``first_block`` on, and what each is verified with.

    digests: of the sender's rank 0; other_digests: of those from 1 on.
    """

    first_block: int
    digests: tuple[int, ...]
    seeds: tuple[int, ...]
    other_digests: tuple[tuple[int, ...], ...] = ()

    @property
    def end_block(self) -> int:
        """The first block behind them."""
        return self.first_block + len(self.digests)

    @property
    def others(self) -> tuple[Share, ...]:
        """What the ranks from 1 on announced."""
        return tuple(Share(rank, digests) for rank, digests in enumerate(self.other_digests, start=1))


class AnnouncedBlocks:
    """Owns the digests that the sender announced, by its blocks. Not thread-safe.

    seeds: one per block of the sender's; so many has the prompt there.
    """

    def __init__(self, plan: TransferPlan, num_tokens: int, seeds: Sequence[int]) -> None:
        self.plan = plan
        self.num_tokens = num_tokens
        self._seeds = tuple(seeds)
        self._digests: list[int] = []
        self._others: list[list[int]] = [[] for _ in range(1, plan.theirs.num_ranks)]

    @classmethod
    def of(cls, request: EngineRequest, terms: PeerTerms) -> "AnnouncedBlocks":
        """Nothing announced yet; the seeds are those that a sender of these terms digests this prompt with."""
        block_size = terms.plan.theirs.layout.block_size
        seeds = digest_seeds(request, terms.model_fingerprint, block_size)
        return cls(terms.plan, len(request.prompt_token_ids), seeds)

    def add(
        self, first_block: int, digests: Sequence[int], others: Sequence[Sequence[int]] = ()
    ) -> tuple[int, tuple[int, ...]]:
        """The sender announced these blocks; returns (first, digests) of our blocks that are complete now, maybe none.

        others: the digests of its ranks from 1 on. The digest of a block of ours stands for it only: it is rank 0's of
        the sender's block that completed it. Raises TransferError for blocks that do not follow those announced before,
        or that the prompt does not have, or where digests of a rank are missing.
        """
        known = len(self._digests)
        total = len(self._seeds)
        if first_block != known or not digests or known + len(digests) > total:
            raise TransferError(
                f"the sender announced {len(digests)} blocks from {first_block}; {known} of {total} were announced"
            )
        if [len(other) for other in others] != [len(digests)] * len(self._others):
            raise TransferError(
                f"the sender announced {len(digests)} blocks of {1 + len(others)} ranks, not alike or not of all:"
                f" it has {self.plan.theirs.num_ranks}"
            )
        before = self.plan.num_covered(known, self.num_tokens)
        self._digests.extend(digests)
        for announced, other in zip(self._others, others, strict=True):
            announced.extend(other)
        after = self.plan.num_covered(len(self._digests), self.num_tokens)
        return before, tuple(self._digests[self._last_source(block)] for block in range(before, after))

    def check_end(self, num_blocks: int) -> None:
        """The sender says that the transfer has so many blocks. Raises TransferError unless it has announced them all."""
        if not num_blocks == len(self._seeds) == len(self._digests):
            raise TransferError(
                f"the sender ended with {num_blocks} blocks, {len(self._digests)} announced;"
                f" the prompt has {len(self._seeds)} blocks there"
            )

    def sources_of(self, our_first: int, our_end: int) -> SourceRange:
        """What to read for these blocks of ours, which are complete."""
        blocks = self.plan.source_blocks(our_first, our_end, self.num_tokens)
        return SourceRange(
            blocks.start,
            tuple(self._digests[blocks.start : blocks.stop]),
            self._seeds[blocks.start : blocks.stop],
            tuple(tuple(other[blocks.start : blocks.stop]) for other in self._others),
        )

    def _last_source(self, our_block: int) -> int:
        return self.plan.source_blocks(our_block, our_block + 1, self.num_tokens).stop - 1


def changed_lease(message: msg.BlocksPublished) -> ev.SenderFailed:
    """What a ``published`` means that names another lease than words before it."""
    text = f"the sender changed the lease of transfer {message.transfer_id} in the middle"
    return ev.SenderFailed(ErrorKind.TRANSFER_FAILED, text)


def failed_event(message: msg.TransferFailed) -> ev.SenderFailed:
    """What a ``failed`` means. The scheduler gets NOT_NEEDED, which is no error, or an ErrorKind: others are bugs."""
    is_known = message.kind == NOT_NEEDED or message.kind in set(ErrorKind)
    return ev.SenderFailed(message.kind if is_known else ErrorKind.INTERNAL, message.message)


def published_event(
    announced: AnnouncedBlocks | None, message: msg.BlocksPublished, now: float
) -> ev.Announced | ev.SenderFailed | None:
    """What a ``published`` means for our blocks. announced: None where the sender's are ours.

    None: no further block of ours is complete yet.
    """
    if announced is None:
        if message.other_digests:
            text = f"the sender announced blocks of {1 + len(message.other_digests)} ranks; it has one"
            return ev.SenderFailed(ErrorKind.TRANSFER_FAILED, text)
        return ev.Announced(message.first_block, tuple(message.digests), now)
    try:
        first, digests = announced.add(message.first_block, message.digests, message.other_digests)
    except TransferError as error:
        return ev.SenderFailed(error.kind, error.message)
    return ev.Announced(first, digests, now) if digests else None


def complete_event(
    announced: AnnouncedBlocks | None, message: msg.TransferComplete, our_num_blocks: int
) -> ev.Completed | ev.SenderFailed:
    """What a ``complete`` means for the prompt, which has ``our_num_blocks`` blocks here."""
    if announced is None:
        return ev.Completed(message.num_blocks, tuple(message.first_tokens))
    try:
        announced.check_end(message.num_blocks)
    except TransferError as error:
        return ev.SenderFailed(error.kind, error.message)
    return ev.Completed(our_num_blocks, tuple(message.first_tokens))
