"""The pools of several groups against a model that can be seen through: tables, and which block contains what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contract.block_hash import BlockHash, full_block_hashes, root_hash
from contract.cache_layout import CacheGroup, CacheLayout
from contract.layout import KVLayout
from engine.scheduling.blocks.block_pool import NULL_BLOCK, BlockPool
from engine.scheduling.blocks.cache_pools import Blocks, CachePools, pool_of, prefix_match
from engine.scheduling.blocks.lent_blocks import (
    allocate_each,
    allocate_to_lend,
    can_allocate_each,
    grow_lent,
    hand_over,
    last_blocks,
    plan_received,
    quarantine,
    release_quarantine,
)
from engine.scheduling.blocks.window_pool import WindowPool
from tests.soak_settings import machine_settings

SIZE = 2
CHUNK = 5
NUM_BLOCKS = (14, 10, 9)


def groups_of(*windows: int | None, size: int = SIZE) -> tuple[CacheGroup, ...]:
    layout = KVLayout(num_layers=len(windows), num_kv_heads=1, head_dim=1, block_size=size, dtype="float32")
    return CacheLayout.of(layout, windows).groups


GROUPS = groups_of(None, 6, 3)


def pools_of(groups: tuple[CacheGroup, ...], num_blocks: tuple[int, ...]) -> CachePools:
    return CachePools(groups, list(map(pool_of, groups, num_blocks)), CHUNK)


def is_seen(group: CacheGroup, place: int, start: int) -> bool:
    """Return whether a token at ``start`` or behind it sees a token of the block."""
    last = (place + 1) * group.layout.block_size - 1
    return group.window is None or last > start - group.window


def longest_prefix(groups: tuple[CacheGroup, ...], has: list[list[bool]]) -> int:
    """Try each prefix, the longest first."""
    for num_blocks in range(len(has[0]), 0, -1):
        start = num_blocks * groups[0].layout.block_size
        if all(
            has[index][place]
            for index, group in enumerate(groups)
            for place in range(num_blocks)
            if is_seen(group, place, start)
        ):
            return num_blocks
    return 0


@given(
    st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 8),
    st.data(),
)
def test_the_longest_prefix_that_each_group_has(
    windows: list[int | None], size: int, num_places: int, data: st.DataObject
) -> None:
    groups = groups_of(*windows, size=size)
    row = st.lists(st.booleans(), min_size=num_places, max_size=num_places)
    has = [data.draw(row) for _ in groups]
    found = [[7 if is_cached else NULL_BLOCK for is_cached in own] for own in has]
    assert prefix_match(groups, found) == longest_prefix(groups, has)


def test_a_window_needs_only_the_blocks_before_the_boundary() -> None:
    """A token at 8 sees from 3 on with a window of 6: block 1, which has the tokens 2 and 3, and those behind it."""
    full, window = groups_of(None, 6)
    assert prefix_match([full, window], [[1, 2, 3, 4], [0, 5, 6, 7]]) == 4
    assert prefix_match([full, window], [[1, 2, 3, 4], [0, 0, 6, 7]]) == 0
    assert prefix_match([full, window], [[1, 2, 3, 4], [5, 6, 7, 0]]) == 3
    assert prefix_match([full, window], [[1, 2, 0, 4], [0, 5, 6, 7]]) == 0
    assert prefix_match([window], [[0, 5, 6, 7]]) == 4


def test_groups_have_blocks_of_one_size() -> None:
    """Tables have the block of a position in the same place."""
    with pytest.raises(ValueError, match=r"blocks of \[2, 4\] tokens"):
        CachePools(GROUPS[:1], [BlockPool(9, 4)], CHUNK)


def test_a_long_text_needs_a_part_of_its_blocks_in_a_window() -> None:
    """A window of 3 and a chunk of 5 span 7 tokens, so at most 4 blocks; another request must have room, too."""
    pools = pools_of(groups_of(None, 3), (30, 6))
    assert pools.can_hold(20)
    assert not pools.can_allocate(6)
    assert not pools.can_hold(30)
    assert pools.can_hold(20, others=[1])
    assert not pools.can_hold(20, others=[2])
    # A cached block that is free is among those that the request keeps.
    pools.allocate("a", 4)
    pools.enter("a", 0, chain := full_block_hashes(root_hash("m"), list(range(8)), SIZE))
    pools.free("a")
    cached = pools.find_cached(chain)
    assert [own.count(NULL_BLOCK) for own in cached] == [0, 3]
    assert pools.can_hold(20, cached, others=[1])
    assert not pools.can_hold(26, cached)


def test_what_was_promised_is_there_whoever_shares_the_blocks() -> None:
    """Law 4: a lent prompt holds as many blocks as it was promised, also while others keep those that it has left."""
    pools = pools_of(groups_of(None, 3), (30, 10))
    chain = full_block_hashes(root_hash("m"), list(range(40)), SIZE)
    window = pools.pools[1]
    assert isinstance(window, WindowPool)
    assert pools.can_hold(20)
    allocate_to_lend(pools, "lent", 20, 2, pools.empty())
    assert (pools.first.num_blocks_of("lent"), window.num_blocks_of("lent")) == (20, 2)
    assert window.num_available_blocks == 9 - 4
    others = 0
    for num_blocks in range(2, 21, 2):
        grow_lent(pools, "lent", num_blocks)
        pools.enter("lent", num_blocks - 2, chain[num_blocks - 2 : num_blocks])
        pools.free_behind("lent", num_blocks * SIZE)
        pools.check_integrity()
        cached = pools.find_cached(chain[:num_blocks])
        if pools.can_allocate(0, cached):
            pools.allocate(f"other-{num_blocks}", 0, cached)
            others += 1
    assert others == 5  # as many as there are blocks that are not promised
    assert window.num_blocks_of("lent") == 20
    (seen,) = last_blocks(pools, "lent", 40)
    assert len(seen) == 1
    hand_over(pools, "lent", "lease")
    assert window.num_available_blocks == 9 - 5 - 1
    pools.check_integrity()
    pools.free("lease")
    pools.check_integrity()


def test_a_lent_prompt_may_end_between_two_chunks() -> None:
    """Its lease has the blocks of the whole prompt where all tokens are kept, and of a window those of its chunks."""
    pools = pools_of(groups_of(None, 3), (30, 10))
    allocate_to_lend(pools, "lent", 20, 2, pools.empty())
    hand_over(pools, "lent", "lease")
    pools.check_integrity({"lease"})
    with pytest.raises(AssertionError, match="unequal tables"):
        pools.check_integrity()
    pools.free("lease")
    assert [pool.num_available_blocks for pool in pools.pools] == [29, 9]


def test_a_received_prompt_gets_what_its_windows_reach() -> None:
    """A prompt of 21 tokens, 8 of them cached: all other blocks, and with a window those that the token at 21 sees."""
    pools = pools_of(groups_of(None, 6), (30, 12))
    chain = full_block_hashes(root_hash("m"), list(range(8)), SIZE)
    pools.allocate("a", 4)
    pools.enter("a", 0, chain)
    pools.free("a")
    cached = pools.find_cached(chain)
    assert [len(own) for own in cached] == [4, 4]
    heads, numbers = plan_received(pools, 21, cached)
    assert (len(heads[0]), numbers[0]) == (4, 7)
    assert (heads[1], numbers[1]) == ([NULL_BLOCK] * 8, 3)
    assert can_allocate_each(pools, numbers, heads, [4])
    assert not can_allocate_each(pools, numbers, heads, [4] * 4)
    full, window = allocate_each(pools, "b", numbers, heads)
    assert (len(full), len(window)) == (11, 11)
    assert NULL_BLOCK not in full
    assert window[:8] == [NULL_BLOCK] * 8
    assert NULL_BLOCK not in window[8:]
    quarantine(pools, "b", 4)
    assert pools.first.is_quarantined("b")
    pools.check_integrity()
    assert pools.count_by_state()["quarantined"] == 7 + 3
    release_quarantine(pools, "b")
    pools.check_integrity()
    assert pools.usage == 0.0


class CachePoolsMachine(RuleBasedStateMachine):
    """Requests start behind cached prefixes, are computed, grow, separate and end, in any order.

    The model: the tables of each request in each group; the chain of hashes that it fills; how many of its tokens are
    computed; what every block of a group contains.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pools = pools_of(GROUPS, NUM_BLOCKS)
        self.tables: dict[str, list[list[int]]] = {}
        self.chains: dict[str, list[BlockHash]] = {}
        self.num_computed: dict[str, int] = {}
        self.contents: list[dict[int, BlockHash]] = [{} for _ in GROUPS]
        self.num_requests = 0

    def held(self, index: int) -> set[int]:
        return {block for tables in self.tables.values() for block in tables[index]} - {NULL_BLOCK}

    def free(self, index: int) -> set[int]:
        return set(range(1, NUM_BLOCKS[index])) - self.held(index)

    def has_room(self, index: int, num_new: int, cached: list[int]) -> bool:
        """Return whether a group has these blocks. Each reference counts where a window frees them one by one."""
        if GROUPS[index].window is None:
            return num_new + len(self.free(index) & set(cached)) <= len(self.free(index))
        references = [block for tables in self.tables.values() for block in tables[index] if block]
        return num_new + sum(map(bool, cached)) + len(references) < NUM_BLOCKS[index]

    def allocate(self, holder: str, num_new: int, cached: Blocks) -> bool:
        """Allocate if the pools can, and compare with the model; return whether they could."""
        can = all(self.has_room(index, num_new, own) for index, own in enumerate(cached))
        assert self.pools.can_allocate(num_new, cached) is can
        if not can:
            return False
        free = [self.free(index) for index in range(len(GROUPS))]
        got = self.pools.allocate(holder, num_new, cached)
        own_tables = self.tables.setdefault(holder, [[] for _ in GROUPS])
        for index, (own, before) in enumerate(zip(got, cached, strict=True)):
            taken = own[len(before) :]
            assert own[: len(before)] == before
            assert set(taken) <= free[index] - set(before)
            assert len(set(taken)) == num_new
            for block in taken:
                self.contents[index].pop(block, None)
            own_tables[index].extend(own)
        return True

    def draw(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.tables)))

    @rule(words=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=6), num_first=st.integers(0, 3))
    def start(self, words: list[int], num_first: int) -> None:
        """Each word is a block's content."""
        chain = full_block_hashes(root_hash("model"), [w for w in words for _ in range(SIZE)], SIZE)
        cached = self.pools.find_cached(chain)
        has = [[each in own.values() for each in chain] for own in self.contents]
        num_cached = longest_prefix(GROUPS, has)
        for group, own, contents in zip(GROUPS, cached, self.contents, strict=True):
            assert len(own) == num_cached
            for place, block in enumerate(own):
                if is_seen(group, place, num_cached * SIZE):
                    assert contents[block] == chain[place]
                else:
                    assert block == NULL_BLOCK
        self.num_requests += 1
        holder = f"r{self.num_requests}"
        if self.allocate(holder, min(num_first, len(chain) - num_cached), cached):
            self.chains[holder] = chain
            self.num_computed[holder] = num_cached * SIZE

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), num_tokens=st.integers(1, CHUNK))
    def compute(self, data: st.DataObject, num_tokens: int) -> None:
        """Full blocks are found from now on; what no later token sees is free."""
        holder = self.draw(data)
        chain = self.chains[holder]
        tables = self.tables[holder]
        start = self.num_computed[holder] // SIZE
        computed = min(self.num_computed[holder] + num_tokens, min(len(tables[0]), len(chain)) * SIZE)
        hashes = chain[start : computed // SIZE]
        self.pools.enter(holder, start, hashes)
        for place, block_hash in enumerate(hashes, start):
            for own, contents in zip(tables, self.contents, strict=True):
                if block_hash not in contents.values():
                    contents[own[place]] = block_hash
        self.pools.free_behind(holder, computed)
        for group, own in zip(GROUPS, tables, strict=True):
            own[:] = [
                block if is_seen(group, place, computed) else NULL_BLOCK for place, block in enumerate(own)
            ]
        self.num_computed[holder] = computed

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), num=st.integers(1, 3))
    def grow(self, data: st.DataObject, num: int) -> None:
        self.allocate(self.draw(data), num, tuple([] for _ in GROUPS))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Another choice shares the full blocks that are computed, null ones included."""
        first = self.draw(data)
        num_full = self.num_computed[first] // SIZE
        self.num_requests += 1
        fork = f"r{self.num_requests}"
        if self.allocate(fork, 1, tuple(own[:num_full] for own in self.tables[first])):
            self.chains[fork] = self.chains[first]
            self.num_computed[fork] = num_full * SIZE

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), is_corrupt=st.booleans())
    def end(self, data: st.DataObject, is_corrupt: bool) -> None:
        holder = self.draw(data)
        if is_corrupt:
            self.pools.forget_content(holder)
            for own, contents in zip(self.tables[holder], self.contents, strict=True):
                for block in own:
                    contents.pop(block, None)
        self.pools.free(holder)
        del self.tables[holder], self.chains[holder], self.num_computed[holder]

    @rule()
    def reset(self) -> None:
        is_idle = not any(self.held(index) for index in range(len(GROUPS)))
        assert self.pools.reset_prefix_cache() is is_idle
        if is_idle:
            self.contents = [{} for _ in GROUPS]

    @invariant()
    def books_are_right(self) -> None:
        """The pools' own check, and the model's view of tables, states and contents (law 1)."""
        self.pools.check_integrity()
        num_held = [len(self.held(index)) for index in range(len(GROUPS))]
        for holder, tables in self.tables.items():
            assert list(self.pools.tables_of(holder)) == tables
        assert set(self.pools.holders()) == set(self.tables)
        counts = self.pools.count_by_state()
        assert counts["held"] == sum(num_held)
        assert counts["null"] == len(GROUPS)
        assert sum(counts.values()) == sum(NUM_BLOCKS)
        assert self.pools.usage == pytest.approx(
            max(held / (number - 1) for held, number in zip(num_held, NUM_BLOCKS, strict=True))
        )
        for pool, contents in zip(self.pools.pools, self.contents, strict=True):
            for block, block_hash in contents.items():
                assert pool.find_cached([block_hash]) == [block]

    def teardown(self) -> None:
        for holder in list(self.tables):
            self.pools.free(holder)
        assert self.pools.usage == 0.0
        self.pools.check_integrity()


TestCachePools = CachePoolsMachine.TestCase
TestCachePools.settings = machine_settings(60, 40)
