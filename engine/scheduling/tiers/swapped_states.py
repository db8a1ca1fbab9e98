"""The states of preempted requests in the tiers: a slot is stored in pieces, and found by the text that it has absorbed.

A text is named by the hash of its last block, full or partly filled. Its pieces are content of the tier as blocks are: they
belong to no request, and are evicted in their turn.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from contract.block_hash import BlockHash, block_hash
from engine.kv_tiers.storage import BlockCopy
from engine.scheduling.blocks.state_slots import StateSlots
from engine.scheduling.tiers.tier import Tier
from engine.scheduling.tiers.write_behind import MAX_SECONDS


class _LateStore(NamedTuple):
    """A copy that a preemption has not waited for; its slot is held until it is over."""

    tier: Tier
    copies: Sequence[BlockCopy]
    future: Future[int]
    holder: str

    def end(self, slots: StateSlots) -> None:
        """Record what is stored, and free the slot."""
        self.tier.complete_store(self.copies, self.future.result())
        slots.free(self.holder)


class SwappedStates:
    """Owns the copies of states to tiers that are not over. tiers: fastest first, with a slot for each piece."""

    def __init__(self, slots: StateSlots, tiers: Sequence[Tier]) -> None:
        self._slots = slots
        self.tiers = list(tiers)
        self._late: list[_LateStore] = []

    @property
    def holders(self) -> list[str]:
        """The holders of slots that are being copied to a tier."""
        return [store.holder for store in self._late]

    def store_now(self, holder: str, text: BlockHash, num_tokens: int) -> None:
        """Store the states of a holder behind so many tokens of a text in one tier, and wait for that for a limited time."""
        for tier in self.tiers:
            if tier.storage.is_off or tier.num_stuck or self._late:
                continue
            pieces = self._slots.pieces_of(holder)
            hashes = _hashes_of(text, len(pieces))
            if all(content in tier.slots for content in hashes):
                for content in hashes:
                    tier.slots.touch(content)
                return
            tier.drop(hashes)  # a part of them may have been evicted
            copies = []
            for piece, piece_hash in zip(pieces, hashes, strict=True):
                if (slot := tier.slots.prepare_store(piece_hash)) is not None:
                    copies.append(BlockCopy(piece, slot, piece_hash, num_tokens))
            if len(copies) < len(pieces):
                tier.complete_store(copies, 0)
                continue
            store = _LateStore(tier, copies, tier.storage.store(copies), f"tier:{tier.storage.name}")
            self._slots.hand_over(holder, store.holder)
            if not tier.storage.settle(MAX_SECONDS) or not store.future.done():
                self._late.append(store)
                return
            self._slots.hand_over(store.holder, holder)
            is_stored = store.future.result() == len(copies)
            tier.complete_store(copies, store.future.result())
            if is_stored:
                return

    def find(self, text: BlockHash) -> Tier | None:
        """Return the fastest tier that has the states behind this text."""
        hashes = _hashes_of(text, self._slots.num_pieces)
        ready = (tier for tier in self.tiers if tier.is_ready)
        return next((tier for tier in ready if all(piece in tier.slots for piece in hashes)), None)

    def copies_from(self, tier: Tier, text: BlockHash, holder: str, num_tokens: int) -> list[BlockCopy]:
        """Return the copies that load the states behind a text, of so many tokens, into the slot of a holder."""
        pieces = self._slots.pieces_of(holder)
        each = zip(pieces, _hashes_of(text, len(pieces)), strict=True)
        return [
            BlockCopy(piece, tier.slots.prepare_load(piece_hash), piece_hash, num_tokens)
            for piece, piece_hash in each
        ]

    def advance(self) -> None:
        """End the copies that are over."""
        for store in [store for store in self._late if store.future.done()]:
            self._late.remove(store)
            store.end(self._slots)

    def settle(self) -> None:
        """Wait for the end of the copies."""
        for store in self._late:
            store.tier.storage.settle()
        self.advance()

    def check_integrity(self) -> None:
        """Assert that the slots of each tier match its copies."""
        for tier in self.tiers:
            tier.slots.check_integrity(sum(len(one.copies) for one in self._late if one.tier is tier))


def _hashes_of(text: BlockHash, num_pieces: int) -> list[BlockHash]:
    return [block_hash(text, [piece]) for piece in range(num_pieces)]
