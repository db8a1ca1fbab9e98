"""The slots of one tier: which content is in which of them, and which one the next content gets."""

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence

from contract.block_hash import BlockHash


class TierSlots:
    """Owns which content each slot of a tier has, and the order in which contents are evicted: least recently used first.

    A slot is free, or stored (its content can be found), or only copied to or from. One that is stored may be copied from at
    the same time; it is not evicted meanwhile. One whose content is dropped while it is copied becomes free at the end.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_evicted = 0
        self._stored: OrderedDict[BlockHash, int] = OrderedDict()
        self._storing: dict[BlockHash, int] = {}
        self._num_loads: Counter[int] = Counter()
        self._free = list(range(num_slots - 1, -1, -1))

    def restore(self, contents: Sequence[tuple[BlockHash, int]]) -> None:
        """Let content be found that was in the slots before, the least recently used first; all slots are free until now."""
        for block_hash, slot in contents:
            self._stored.pop(block_hash, None)  # of two slots with the same content the newer one
            self._stored[block_hash] = slot
        stored = set(self._stored.values())
        self._free = [slot for slot in self._free if slot not in stored]

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._stored

    def is_expected(self, block_hash: BlockHash) -> bool:
        """Return whether this content is stored, or is being stored."""
        return block_hash in self._stored or block_hash in self._storing

    def touch(self, block_hash: BlockHash) -> None:
        """Record a use of stored content."""
        self._stored.move_to_end(block_hash)

    def prepare_store(self, block_hash: BlockHash) -> int | None:
        """Return a slot for content that is not here, and evict what it held; None if every slot is being copied."""
        if not self._free:
            victim = next((one for one, slot in self._stored.items() if not self._num_loads[slot]), None)
            if victim is None:
                return None
            self._free.append(self._stored.pop(victim))
            self.num_evicted += 1
        slot = self._storing[block_hash] = self._free.pop()
        return slot

    def complete_store(self, block_hash: BlockHash, slot: int, *, is_stored: bool) -> bool:
        """Let content be found that was copied to its slot, unless it was dropped meanwhile; return whether it can be."""
        is_dropped = self._storing.get(block_hash) != slot
        if not is_dropped:
            del self._storing[block_hash]
        if is_dropped or not is_stored:
            self._free.append(slot)
            return False
        self._stored[block_hash] = slot
        return True

    def prepare_load(self, block_hash: BlockHash) -> int:
        """Return the slot of stored content, which stays until ``complete_load``."""
        self._stored.move_to_end(block_hash)
        slot = self._stored[block_hash]
        self._num_loads[slot] += 1
        return slot

    def complete_load(self, block_hash: BlockHash, slot: int) -> None:
        """End a load."""
        self._num_loads[slot] -= 1
        if not self._num_loads[slot]:
            del self._num_loads[slot]
            if self._stored.get(block_hash) != slot:
                self._free.append(slot)

    def drop(self, hashes: Collection[BlockHash]) -> list[int]:
        """Drop these contents: they are damaged, or not right any more. What is being stored is not found later.

        Returns the slots that had them.
        """
        dropped = []
        for block_hash in hashes:
            self._storing.pop(block_hash, None)
            slot = self._stored.pop(block_hash, None)
            if slot is None:
                continue
            dropped.append(slot)
            if not self._num_loads[slot]:
                self._free.append(slot)
        return dropped

    def clear(self) -> None:
        """Drop all content."""
        self.drop([*self._storing, *self._stored])

    def check_integrity(self, num_storing: int) -> None:
        """Assert that each slot is in one state. num_storing: copies to slots that have not ended."""
        stored = set(self._stored.values())
        loading = {slot for slot, count in self._num_loads.items() if count}
        assert len(stored) == len(self._stored), "a slot has two contents"
        assert not stored & set(self._free), "a free slot can be found"
        assert not loading & set(self._free), "a slot that is loaded is free"
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        num_other = self.num_slots - len(self._free) - len(stored | loading)
        assert num_other == num_storing, f"{num_other} slots are lost, or copied to"
