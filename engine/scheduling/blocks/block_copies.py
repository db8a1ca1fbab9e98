"""The copies that are to be made before anything else is computed: of blocks in each group, and of slots of states."""

from engine.scheduling.blocks.cache_pools import CachePools


class BlockCopies:
    """Owns the copies that are not ordered yet; those of slots are the ``StateSlots``'."""

    def __init__(self, pools: CachePools) -> None:
        self._pools = pools
        self._of_groups: list[list[tuple[int, int]]] = []

    def fork(self, holder: str, new_holder: str, place: int | None) -> None:
        """Copy a holder's state, and its block at ``place`` of each group, for another one; None: no block."""
        if self._pools.states is not None:
            self._pools.states.fork(holder, new_holder)
        if place is None:
            return
        pairs = [
            (pool.table_of(holder)[place], pool.table_of(new_holder)[place]) for pool in self._pools.pools
        ]
        before = self._of_groups or [[] for _ in pairs]
        self._of_groups = [[*each, pair] for each, pair in zip(before, pairs, strict=True)]

    def pop(self) -> list[list[tuple[int, int]]]:
        """Return (from, to) of the copies of each group, and behind them those of slots, which are made now; empty: none."""
        copies = self._of_groups
        self._of_groups = []
        slots = self._pools.states
        if slots is None:
            return copies
        of_slots = slots.pop_copies()
        if not copies and not of_slots:
            return []
        return [*(copies or [[] for _ in self._pools.pools]), of_slots]
