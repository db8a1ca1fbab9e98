"""The slots for the states of recurrent layers (``contract.state_layout``): a request has one, as long as it has blocks."""

from contract.block_hash import BlockHash
from contract.state_layout import NO_SLOT
from engine.scheduling.blocks.state_snapshots import StateSnapshots


class StateSlots:
    """The one owner of slots: each is free, held by one request or lease, which no other shares, or quarantined.

    copies: (from, to) of slots to be copied, one after the other, before anything else is computed; not ordered yet.
    snapshots: in further slots; None without any. num_spares: slots behind all others, in which the runner keeps states
    during a step with drafts: as many requests may have some. num_pieces: of a slot, by which it is handed over.
    """

    def __init__(
        self,
        num_slots: int,
        snapshots: StateSnapshots | None = None,
        num_spares: int = 0,
        num_pieces: int = 1,
    ) -> None:
        self.num_slots = num_slots
        self.snapshots = snapshots
        self.num_spares = num_spares
        self.num_pieces = num_pieces
        self.copies: list[tuple[int, int]] = []
        self._free = list(range(num_slots, NO_SLOT, -1))
        self._slot_of: dict[str, int] = {}
        self._quarantined: dict[str, int] = {}

    @property
    def num_free(self) -> int:
        """Slots that may be taken now."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """The share of slots that are not free, 0..1."""
        return 1.0 - len(self._free) / self.num_slots

    def allocate(self, holder: str) -> list[int]:
        """Give a slot to a holder that has none; return it, or nothing for one that has one. One must be free."""
        if holder in self._slot_of:
            return []
        slot = self._slot_of[holder] = self._free.pop()
        return [slot]

    @property
    def next_to_receive(self) -> int:
        """The free slot into which a read may write at once; NO_SLOT if there is none.

        Copies that are not made yet would read or overwrite what arrives there. So it is one without any, or else one of
        which only snapshots are to be made, which are given up; a choice that continues from a copy needs it.
        """
        sources = {source for source, _ in self.copies}
        needed = {*self._slot_of.values(), *sources}
        kept = {source for source, target in self.copies if target in needed}
        return min(
            (slot for slot in self._free if slot not in kept), key=sources.__contains__, default=NO_SLOT
        )

    def allocate_to_receive(self, holder: str) -> list[int]:
        """Give ``next_to_receive``, which must be a slot, to a holder that has none; return it."""
        slot = self.next_to_receive
        self._free.remove(slot)
        dropped = {target for source, target in self.copies if source == slot}
        self.copies = [pair for pair in self.copies if pair[0] != slot]
        if self.snapshots is not None:
            self.snapshots.forget_slots(dropped)
        self._slot_of[holder] = slot
        return [slot]

    def pieces_of(self, holder: str) -> list[int]:
        """Return the numbers of the pieces of a holder's slot, among those of all slots."""
        slot = self._slot_of[holder]
        return list(range((slot - 1) * self.num_pieces, slot * self.num_pieces))

    def hand_over(self, holder: str, new_holder: str) -> None:
        """Give the slot of a holder to another one, which has none: what it lends stays there."""
        if self.snapshots is not None:
            self.snapshots.release(holder)
        if holder in self._slot_of:
            self._slot_of[new_holder] = self._slot_of.pop(holder)

    def quarantine(self, holder: str) -> None:
        """Keep a holder's slot, into which a read may still write, until ``release_quarantine``."""
        self._quarantined[holder] = self._slot_of.pop(holder)

    def release_quarantine(self, holder: str) -> None:
        """Free the quarantined slot of a holder: the last read into it is terminal."""
        self._free.append(self._quarantined.pop(holder))

    def fork(self, holder: str, new_holder: str) -> None:
        """Copy the state of a holder for another one, which has a slot."""
        self.copies.append((self._slot_of[holder], self._slot_of[new_holder]))

    def save(self, holder: str, num_tokens: int, num_prompt_tokens: int, hashes: list[BlockHash]) -> None:
        """Copy the state of a holder behind its computed tokens, if a snapshot is due there. hashes: of its full blocks."""
        snapshots = self.snapshots
        if snapshots is None or not snapshots.is_due(num_tokens, num_prompt_tokens):
            return
        block_hash = hashes[num_tokens // snapshots.block_size - 1]
        slot = snapshots.add(holder, block_hash, is_of_answer=num_tokens >= num_prompt_tokens)
        if slot != NO_SLOT:
            self.copies.append((self._slot_of[holder], slot))

    def restore(self, holder: str, snapshot: int) -> None:
        """Copy a snapshot for a holder, which has a slot."""
        self.copies.append((snapshot, self._slot_of[holder]))

    def free(self, holder: str) -> None:
        """Free the slot of a holder, if it has one. Its content is read by copies that are not made yet, and never again."""
        if self.snapshots is not None:
            self.snapshots.release(holder)
        slot = self._slot_of.pop(holder, NO_SLOT)
        if slot != NO_SLOT:
            # A copy into it would come behind what another request may receive there.
            self.copies = [pair for pair in self.copies if pair[1] != slot]
            self._free.append(slot)

    def table_of(self, holder: str) -> list[int]:
        """Return the slot of a holder, in a list; an empty one for a holder without a slot."""
        slot = self._slot_of.get(holder)
        return [] if slot is None else [slot]

    def holders(self) -> set[str]:
        """Return those that have a slot."""
        return set(self._slot_of)

    def count_by_state(self) -> dict[str, int]:
        """Return the number of slots in each state, without those of snapshots and drafts."""
        return {"free": len(self._free), "held": len(self._slot_of), "quarantined": len(self._quarantined)}

    def pop_copies(self) -> list[tuple[int, int]]:
        """Return ``copies``, which are to be made now."""
        copies, self.copies = self.copies, []
        return copies

    def check_integrity(self) -> None:
        """Raise AssertionError unless each slot is in one state."""
        slots = [*self._free, *self._slot_of.values(), *self._quarantined.values()]
        assert sorted(slots) == list(range(1, self.num_slots + 1))
        if self.snapshots is not None:
            last = self.num_slots + self.snapshots.num_slots
            assert sorted(self.snapshots.slots()) == list(range(self.num_slots + 1, last + 1))
