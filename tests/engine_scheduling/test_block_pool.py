"""The block pool and its prefix index (law 1)."""

import pytest

from contract.block_hash import full_block_hashes, root_hash
from engine.scheduling.blocks.block_pool import BlockPool, blocks_needed

SIZE = 4


def hashes(tokens: list[int], salt: str = "") -> list[bytes]:
    return full_block_hashes(root_hash("model", salt), tokens, SIZE)


def fill(pool: BlockPool, holder: str, tokens: list[int]) -> list[int]:
    """Hold and compute the full blocks of these tokens."""
    chain = hashes(tokens)
    cached = pool.find_cached(chain)
    blocks = pool.allocate(holder, len(chain) - len(cached), cached)
    pool.enter(holder, 0, chain)
    pool.check_integrity()
    return blocks


def test_block_zero_is_null_and_ids_start_ascending() -> None:
    """C9, C13: block 0 is reserved; blocks are handed out as 1, 2, 3... and grow on demand (A14)."""
    pool = BlockPool(9, 2)
    assert pool.allocate("a", 2) == [1, 2]
    assert pool.allocate("b", 1) == [3]
    assert pool.allocate("c", 3) == [4, 5, 6]
    assert pool.allocate("a", 1) == [7]
    assert pool.allocate("c", 1) == [8]
    assert pool.table_of("a") == [1, 2, 7]
    assert not pool.can_allocate(1)
    assert pool.usage == 1.0
    pool.check_integrity()


def test_blocks_needed_for_tokens() -> None:
    """A38: 21 tokens need 2 blocks of 16, 10 tokens need 1."""
    assert [blocks_needed(n, 16) for n in (0, 1, 10, 16, 17, 21)] == [0, 1, 1, 1, 2, 2]


def test_freed_blocks_go_to_the_tail_last_block_first() -> None:
    pool = BlockPool(6, SIZE)
    pool.allocate("a", 3)
    pool.free("a")
    assert pool.allocate("b", 5) == [4, 5, 3, 2, 1]


def test_content_is_found_until_the_block_is_taken() -> None:
    pool = BlockPool(4, SIZE)
    tokens = list(range(12))
    assert fill(pool, "a", tokens) == [1, 2, 3]
    pool.free("a")
    assert pool.find_cached(hashes(tokens)) == [1, 2, 3]
    pool.allocate("b", 1)  # takes block 3: the tail of the prefix goes first
    assert pool.find_cached(hashes(tokens)) == [1, 2]
    assert pool.can_allocate(0, [1, 2]) and not pool.can_allocate(1, [1, 2])
    assert pool.allocate("c", 0, [1, 2]) == [1, 2]
    assert pool.num_free_blocks == 0
    pool.check_integrity()


def test_salt_and_first_difference_end_a_match() -> None:
    """B11: cache_salt isolates caches."""
    pool = BlockPool(8, SIZE)
    fill(pool, "a", list(range(12)))
    assert pool.find_cached(hashes([*range(8), 99, 99, 99, 99])) == [1, 2]
    assert pool.find_cached(hashes(list(range(12)), salt="mine")) == []


def test_of_two_equal_blocks_the_first_stays_indexed() -> None:
    pool = BlockPool(8, SIZE)
    chain = hashes([1, 2, 3, 4])
    for holder in ("a", "b"):
        pool.allocate(holder, 1)
        pool.enter(holder, 0, chain[:1])
    assert pool.find_cached(chain) == [1]
    pool.free("b")
    assert pool.find_cached(chain) == [1]
    pool.check_integrity()


def test_shared_blocks_are_counted_per_holder() -> None:
    pool = BlockPool(8, SIZE)
    fill(pool, "a", list(range(8)))
    fill(pool, "b", list(range(8)))
    assert pool.count_by_state() == {"null": 1, "free": 5, "held": 2, "quarantined": 0}
    pool.free("a")
    assert pool.count_by_state()["held"] == 2
    pool.hand_over("b", "lease:b")
    assert pool.holders() == {"lease:b": 2}
    pool.free("lease:b")
    assert pool.num_free_blocks == pool.num_usable_blocks


def test_quarantined_blocks_are_not_allocated() -> None:
    """Law 2: a destination block has no owner until the read into it is terminal."""
    pool = BlockPool(5, SIZE)
    fill(pool, "other", list(range(4)))
    cached = pool.find_cached(hashes(list(range(4))))
    pool.allocate("reader", 2, cached)
    pool.quarantine("reader", num_shared=1)
    pool.check_integrity()
    assert pool.count_by_state() == {"null": 1, "free": 1, "held": 1, "quarantined": 2}
    assert not pool.can_allocate(2)
    pool.release_quarantine("reader")
    assert pool.can_allocate(3)
    pool.check_integrity()


def test_shared_destination_is_refused() -> None:
    pool = BlockPool(5, SIZE)
    fill(pool, "a", list(range(4)))
    fill(pool, "b", list(range(4)))
    with pytest.raises(ValueError, match="shared"):
        pool.quarantine("b")


def test_reset_only_while_nothing_is_in_use() -> None:
    """B16: False and no change while blocks are in use, True and empty otherwise."""
    pool = BlockPool(5, SIZE)
    fill(pool, "a", list(range(4)))
    assert pool.reset_prefix_cache() is False
    assert pool.find_cached(hashes(list(range(4)))) == [1]
    pool.free("a")
    assert pool.reset_prefix_cache() is True
    assert pool.find_cached(hashes(list(range(4)))) == []


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(5, SIZE, enable_prefix_caching=False)
    fill(pool, "a", list(range(4)))
    assert pool.find_cached(hashes(list(range(4)))) == []
