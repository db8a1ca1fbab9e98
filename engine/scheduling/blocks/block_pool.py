"""The one owner of KV blocks (law 1): their holders, which of them are free, and what free ones still contain."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

from contract.block_hash import BlockHash

NULL_BLOCK = 0
_NOTHING: tuple[int, ...] = ()
_ALL = slice(None)


class PrefixIndex:
    """Finds blocks by content. Owns no block: the BlockPool enters computed or verified ones, and evicts taken ones.

    Of two blocks with the same content the first stays indexed, so a hash names at most one block.
    """

    def __init__(self) -> None:
        self._block_by_hash: dict[BlockHash, int] = {}
        self._hash_by_block: dict[int, BlockHash] = {}

    def __len__(self) -> int:
        return len(self._block_by_hash)

    def find(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Return the blocks of the longest indexed prefix of ``hashes``, first to last."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._block_by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def find_each(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Return the block of each hash; the null block for one that is not indexed."""
        return [self._block_by_hash.get(block_hash, NULL_BLOCK) for block_hash in hashes]

    def enter(self, block_ids: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """Record that each block holds this content, unless another block does already. The null block holds none."""
        block_by_hash = self._block_by_hash
        hash_by_block = self._hash_by_block
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            if block_id and block_hash not in block_by_hash and block_id not in hash_by_block:
                block_by_hash[block_hash] = block_id
                hash_by_block[block_id] = block_hash

    def evict(self, block_id: int) -> None:
        """Drop the content of a block, if it has any: it is about to be written."""
        block_hash = self._hash_by_block.pop(block_id, None)
        if block_hash is not None:
            del self._block_by_hash[block_hash]

    def content_of(self, block_id: int) -> BlockHash | None:
        """Return the hash by which the block's content can be found; None if it cannot."""
        return self._hash_by_block.get(block_id)

    def clear(self) -> None:
        """Drop all entries."""
        self._block_by_hash.clear()
        self._hash_by_block.clear()

    def check_integrity(self) -> None:
        """Assert that both directions agree."""
        assert {block: h for h, block in self._block_by_hash.items()} == self._hash_by_block


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Return ceil(num_tokens / block_size)."""
    return -(-num_tokens // block_size)


class BlockPool:
    """All blocks; each is in one state: null (block 0), free, held (one reference or more) or quarantined.

    References belong to *holders*, named by a string: a request's key, or ``lease:<key>`` for blocks that another
    worker may still read. A holder's blocks are ordered: they are its block table. It begins with the null block in place
    of blocks that no later token sees. A free block's old content can be found by hash until the block is taken. A
    quarantined one may be written by a read that cannot be cancelled: it is not allocated before ``release_quarantine``.

    num_usable_blocks: all but the null block. eviction_clock: advances by 1 for each block that may have left the list of
    free ones, and by all of them when some are put back at its head.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"a pool of {num_blocks} blocks holds nothing; block 0 is the null block, give 2 or more"
            )
        self.num_blocks = num_blocks
        self.num_usable_blocks = num_blocks - 1
        self.block_size = block_size
        self._caches_prefixes = enable_prefix_caching
        self._index = PrefixIndex()
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._references = [0] * num_blocks
        self._tables: dict[str, list[int]] = {}
        self._quarantined: dict[str, list[int]] = {}
        self.eviction_clock = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that may be taken now."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """The share of usable blocks that are not free, 0..1."""
        return 1.0 - len(self._free) / self.num_usable_blocks

    def find_cached(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the blocks of the longest cached prefix of ``hashes``. They are valid until the pool changes."""
        return self._index.find(hashes) if self._caches_prefixes else []

    def find_each_cached(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the cached block of each hash, valid until the pool changes; the null block where there is none."""
        return self._index.find_each(hashes) if self._caches_prefixes else [NULL_BLOCK] * len(hashes)

    @property
    def num_available_blocks(self) -> int:
        """Blocks that any holder may get now."""
        return len(self._free)

    def cost_of(self, cached: Sequence[int]) -> int:
        """Return how many available blocks references to these cached ones would take."""
        return sum(map(self._free.__contains__, cached))

    def can_allocate(self, num_new: int, cached: Sequence[int] = _NOTHING) -> bool:
        """Return whether ``allocate`` with the same arguments may be called; free cached blocks leave the free list too."""
        return num_new + self.cost_of(cached) <= self.num_available_blocks

    def allocate(self, holder: str, num_new: int, cached: Sequence[int] = _NOTHING) -> list[int]:
        """Append the ``cached`` blocks (by one more reference) and ``num_new`` taken ones to the holder's table.

        Returns the appended block ids. Requires ``can_allocate`` of the same arguments.
        """
        table = self._tables.setdefault(holder, [])
        self.eviction_clock += num_new + len(cached)
        for block in filter(None, cached):  # without the null block
            self._free.pop(block, None)  # if no other holder has it
            self._references[block] += 1
        taken = []
        for _ in range(num_new):
            # From the front: what was freed first, so that the content that was used last is found longest.
            block, _ = self._free.popitem(last=False)
            self._index.evict(block)
            self._references[block] = 1
            taken.append(block)
        table.extend([*cached, *taken])
        return [*cached, *taken]

    def table_of(self, holder: str) -> list[int]:
        """Return the holder's blocks in order (a copy); empty for one that holds nothing."""
        return list(self._tables.get(holder, ()))

    def num_blocks_of(self, holder: str) -> int:
        """Return the length of the holder's table."""
        return len(self._tables.get(holder, ()))

    def enter(self, holder: str, start: int, hashes: Sequence[BlockHash]) -> list[int]:
        """Let the holder's blocks from its ``start``-th on, which are full and computed or verified, be found by content.

        Returns these blocks.
        """
        block_ids = self._tables[holder][start : start + len(hashes)]
        if self._caches_prefixes:
            self._index.enter(block_ids, hashes)
        return block_ids

    def has_content(self, block_id: int, block_hash: BlockHash) -> bool:
        """Return whether this content can be found, is found in this block, and is of use there."""
        return self._index.content_of(block_id) == block_hash

    def is_free(self, block_id: int) -> bool:
        """Return whether the block has no holder, and may be taken."""
        return block_id in self._free

    def next_blocks(self, num_blocks: int) -> list[int]:
        """Return the free blocks that are allocated next, in that order, ``num_blocks`` at most."""
        return list(islice(self._free, num_blocks))

    def forget_content(self, holder: str, places: slice = _ALL) -> None:
        """Let the content of the holder's blocks at these places, which is corrupt, not be found any more."""
        for block in self._tables.get(holder, [])[places]:
            self._index.evict(block)

    def free_behind(self, holder: str, num_passed: int) -> list[int]:
        """Drop references to the first blocks, which no later token sees; return those not dropped earlier, newest first."""
        table = self._tables[holder]
        dropped = list(takewhile(bool, map(table.__getitem__, range(num_passed - 1, -1, -1))))
        table[num_passed - len(dropped) : num_passed] = [NULL_BLOCK] * len(dropped)
        for block in dropped:
            self._drop_reference(block)
        return dropped

    def hand_over(self, holder: str, new_holder: str) -> None:
        """Give all references of ``holder`` to ``new_holder``, which must hold nothing."""
        if new_holder in self._tables:
            raise ValueError(f"{new_holder} holds blocks already")
        self._tables[new_holder] = self._tables.pop(holder, [])

    def free(self, holder: str, next_blocks: Sequence[int] = _NOTHING) -> None:
        """Drop all references of the holder, last block first, so that heads of prefixes survive longest.

        next_blocks: the head of the list of free blocks, as it was before this holder held some of them: these are the first
        ones again, in this order, as far as they are free.
        """
        for block in filter(None, reversed(self._tables.pop(holder, []))):
            self._drop_reference(block)
        for block in reversed(next_blocks):
            if block in self._free:
                self._free.move_to_end(block, last=False)
        if next_blocks:
            self.eviction_clock += self.num_usable_blocks

    def quarantine(self, holder: str, num_shared: int = 0) -> None:
        """Keep a holder's blocks, into which reads may still write, in quarantine until ``release_quarantine(holder)``.

        num_shared: the first blocks, which came from the cache and are only released.
        """
        table = self._tables.pop(holder)
        kept = list(filter(None, table[num_shared:]))  # without the null block
        for block in kept:
            if self._references[block] != 1:
                raise ValueError(f"block {block} of {holder} is shared; no read may write into it")
            self._references[block] = 0
            self._index.evict(block)  # the read that goes on may leave anything in it
        self._quarantined[holder] = kept
        for block in filter(None, reversed(table[:num_shared])):
            self._drop_reference(block)

    def release_quarantine(self, holder: str) -> None:
        """Free the quarantined blocks of a holder: the last read into them is terminal."""
        for block in reversed(self._quarantined.pop(holder)):
            self._free[block] = None

    def is_quarantined(self, holder: str) -> bool:
        """Return whether blocks of the holder are quarantined."""
        return holder in self._quarantined

    def reset_prefix_cache(self) -> bool:
        """Drop all content (the weights changed). Returns False, and does nothing, while a block is not free."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        self._index.clear()
        return True

    def holders(self) -> dict[str, int]:
        """Return how many blocks each holder holds."""
        return {holder: len(table) - table.count(NULL_BLOCK) for holder, table in self._tables.items()}

    def count_by_state(self) -> dict[str, int]:
        """Return the number of blocks in each state; the four sum to ``num_blocks``."""
        num_quarantined = sum(map(len, self._quarantined.values()))
        num_held = sum(count > 0 for count in self._references)
        return {"null": 1, "free": self.num_free_blocks, "held": num_held, "quarantined": num_quarantined}

    def check_integrity(self) -> None:
        """Recompute every count from the holders. Raises AssertionError for a wrong one."""
        counted = Counter(block for table in self._tables.values() for block in table if block != NULL_BLOCK)
        assert all(self._references[block] == counted[block] for block in range(self.num_blocks))
        quarantined = [block for blocks in self._quarantined.values() for block in blocks]
        states = [NULL_BLOCK, *self._free, *counted, *quarantined]
        assert sorted(states) == list(range(self.num_blocks)), "a block is in no state, or in two"
        assert sum(self.count_by_state().values()) == self.num_blocks
        self._index.check_integrity()
        assert not any(self._index.content_of(block) for block in quarantined)

    def _drop_reference(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free[block] = None
