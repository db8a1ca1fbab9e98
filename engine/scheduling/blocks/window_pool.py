"""The pool of a group of layers with a window, in which blocks are promised to requests that are never preempted."""

from collections.abc import Sequence

from contract.block_hash import BlockHash
from engine.scheduling.blocks.block_pool import NULL_BLOCK, BlockPool


class WindowPool(BlockPool):
    """A ``BlockPool`` that can promise blocks to a holder (law 4).

    A prompt whose KV is lent gets the blocks of its window and a chunk, and returns those that the window has passed while
    it takes others. What it has returned, no other holder may get before it is computed. So each reference counts as
    a block here, also one to a block that several holders share: one of them could not drop it to get another.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
        self._promises: dict[str, int] = {}
        """The number of blocks that a holder may take yet."""
        self._num_references = 0
        self._num_promised = 0
        self._num_quarantined = 0
        self._passed: set[int] = set()
        self._newest_passed: dict[str, int] = {}

    @property
    def num_available_blocks(self) -> int:
        """See BlockPool."""
        return self.num_usable_blocks - self._num_references - self._num_promised - self._num_quarantined

    def cost_of(self, cached: Sequence[int]) -> int:
        """See BlockPool: one for each, also if others hold it."""
        return sum(map(bool, cached))

    def promise(self, holder: str, num_blocks: int) -> None:
        """Keep so many available blocks for a holder, who may hold as many at any time until ``free`` or ``hand_over``."""
        self._promises[holder] = num_blocks
        self._num_promised += num_blocks

    def allocate(self, holder: str, num_new: int, cached: Sequence[int] = ()) -> list[int]:
        """See BlockPool; of what was promised to the holder, if something was."""
        num_taken = num_new + self.cost_of(cached)
        self._num_references += num_taken
        if holder in self._promises:
            self._promises[holder] -= num_taken
            self._num_promised -= num_taken
        appended = super().allocate(holder, num_new, cached)
        self._passed.difference_update(appended)
        return appended

    def free_behind(self, holder: str, num_passed: int) -> list[int]:
        """See BlockPool. A holder with a promise may take as many others."""
        before = self._num_references
        passed = super().free_behind(holder, num_passed)
        if passed:
            # Behind its full blocks, where a text is continued from the cache, the newest of these is seen yet.
            newest = self._newest_passed.get(holder, NULL_BLOCK)
            self._newest_passed[holder] = passed[0]
            self._passed.update(filter(self._free.__contains__, [newest, *passed[1:]]))
        if holder in self._promises:
            self._promises[holder] += before - self._num_references
            self._num_promised += before - self._num_references
        return passed

    def hand_over(self, holder: str, new_holder: str) -> None:
        """See BlockPool: the new holder takes no more."""
        self._end_promise(holder)
        self._newest_passed.pop(holder, None)
        super().hand_over(holder, new_holder)

    def free(self, holder: str, next_blocks: Sequence[int] = ()) -> None:
        """See BlockPool."""
        self._end_promise(holder)
        self._newest_passed.pop(holder, None)
        super().free(holder, next_blocks)

    def quarantine(self, holder: str, num_shared: int = 0) -> None:
        """See BlockPool."""
        super().quarantine(holder, num_shared)
        num_kept = len(self._quarantined[holder])
        self._num_references -= num_kept
        self._num_quarantined += num_kept

    def release_quarantine(self, holder: str) -> None:
        """See BlockPool."""
        self._num_quarantined -= len(self._quarantined[holder])
        super().release_quarantine(holder)

    def check_integrity(self) -> None:
        """See BlockPool; and that what is promised is there."""
        super().check_integrity()
        assert self._num_references == sum(self._references)
        assert self._num_promised == sum(self._promises.values())
        assert all(number >= 0 for number in self._promises.values())
        assert self._num_quarantined == sum(map(len, self._quarantined.values()))
        assert all(map(self.is_free, self._passed))
        assert 0 <= self.num_available_blocks <= self.num_free_blocks - self._num_promised

    def has_content(self, block_id: int, block_hash: BlockHash) -> bool:
        """See BlockPool: of no use is a free block that is not seen where a holder's text would be continued."""
        return block_id not in self._passed and super().has_content(block_id, block_hash)

    def has_promise(self, holder: str) -> bool:
        """Return whether something was promised to the holder."""
        return holder in self._promises

    def _end_promise(self, holder: str) -> None:
        self._num_promised -= self._promises.pop(holder, 0)

    def _drop_reference(self, block: int) -> None:
        self._num_references -= 1
        super()._drop_reference(block)
