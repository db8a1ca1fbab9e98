"""Copies of states at some places of texts, so that a text with the same beginning can be continued there.

A snapshot is found by the hash of the block that ends at its place. They are taken behind each ``_SPACING`` tokens, at the
last multiple of ``unit`` tokens before the end of a prompt, and of an answer at each of these: the next one replaces it, so
that the next turn of a chat continues near its end.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable

from contract.block_hash import BlockHash
from contract.state_layout import NO_SLOT

_UNIT = 64
_SPACING = 2048


class StateSnapshots:
    """Owns the slots of snapshots, which have numbers behind those of requests; the one that was used last stays longest.

    first_slot: its number. num_slots: at least one. unit: tokens, a multiple of ``block_size``.
    """

    def __init__(self, first_slot: int, num_slots: int, block_size: int) -> None:
        self.num_slots = num_slots
        self.block_size = block_size
        self.unit = -(-_UNIT // block_size) * block_size
        self._spacing = max(1, _SPACING // self.unit) * self.unit
        self._free = list(range(first_slot, first_slot + num_slots))
        self._slots: OrderedDict[BlockHash, int] = OrderedDict()
        self._of_answers: dict[str, BlockHash] = {}

    @property
    def num_kept(self) -> int:
        """The number of snapshots."""
        return len(self._slots)

    def cut(self, start: int, num_tokens: int, num_prompt_tokens: int) -> int:
        """Return how many of the next tokens are computed in one step, so that it ends where a snapshot is due."""
        places = [(start // self._spacing + 1) * self._spacing, self._last_of_prompt(num_prompt_tokens)]
        return min([num_tokens, *(place - start for place in places if place > start)])

    def most_drafts(self, num_computed: int) -> int:
        """Return how many drafts a step behind ``num_computed`` tokens may have, not to pass the place of a snapshot."""
        return self.unit - num_computed % self.unit - 1

    def is_due(self, num_tokens: int, num_prompt_tokens: int) -> bool:
        """Return whether a snapshot is taken behind so many tokens of a text."""
        if num_tokens == 0 or num_tokens % self.unit:
            return False
        return num_tokens % self._spacing == 0 or num_tokens >= self._last_of_prompt(num_prompt_tokens)

    def find(self, block_hash: BlockHash) -> int:
        """Return the slot of the snapshot behind this block, valid until one is added; NO_SLOT if there is none."""
        return self._slots.get(block_hash, NO_SLOT)

    def use(self, block_hash: BlockHash) -> None:
        """Keep a snapshot longer than all others."""
        self._slots.move_to_end(block_hash)

    def add(self, holder: str, block_hash: BlockHash, *, is_of_answer: bool) -> int:
        """Return the slot into which the state behind this block is to be copied; NO_SLOT if there is one already."""
        if is_of_answer:
            before = self._of_answers.get(holder)
            self._of_answers[holder] = block_hash
            if before is not None and before != block_hash:
                self.forget([before])
        if block_hash in self._slots:
            self.use(block_hash)
            return NO_SLOT
        slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
        self._slots[block_hash] = slot
        return slot

    def release(self, holder: str) -> None:
        """Keep the snapshot of the holder's answer as any other: the answer has ended."""
        self._of_answers.pop(holder, None)

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """Drop the snapshots behind these blocks."""
        for block_hash in hashes:
            slot = self._slots.pop(block_hash, NO_SLOT)
            if slot != NO_SLOT:
                self._free.append(slot)

    def forget_slots(self, slots: Collection[int]) -> None:
        """Drop the snapshots in these slots, which are not copied after all."""
        self.forget([block_hash for block_hash, slot in self._slots.items() if slot in slots])

    def clear(self) -> None:
        """Drop all snapshots."""
        self.forget(list(self._slots))

    def slots(self) -> list[int]:
        """Return all slots, free ones included."""
        return [*self._free, *self._slots.values()]

    def _last_of_prompt(self, num_prompt_tokens: int) -> int:
        return (num_prompt_tokens - 1) // self.unit * self.unit
