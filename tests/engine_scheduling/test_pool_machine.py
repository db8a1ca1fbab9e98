"""The block pool against a model that is simple enough to be seen through: sets of blocks, and what each contains."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contract.block_hash import BlockHash, full_block_hashes, root_hash
from engine.scheduling.blocks.block_pool import BlockPool
from tests.soak_settings import machine_test

SIZE, NUM_BLOCKS = 4, 12
SALTS = ("", "mine")


class PoolMachine(RuleBasedStateMachine):
    """Holders come, share, grow, compute, end, lend and are quarantined, in any order.

    The model: each holder's table; the chain of hashes that it will fill; how many of its blocks are full; what every
    block contains (written when it is entered, lost when the block is taken).
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, SIZE)
        self.tables: dict[str, list[int]] = {}
        self.chains: dict[str, list[BlockHash]] = {}
        self.num_full: dict[str, int] = {}
        self.quarantined: dict[str, list[int]] = {}
        self.contents: dict[int, BlockHash] = {}
        self.num_holders = 0

    @property
    def held(self) -> set[int]:
        return {block for table in self.tables.values() for block in table}

    @property
    def free(self) -> set[int]:
        return set(range(1, NUM_BLOCKS)) - self.held - {b for q in self.quarantined.values() for b in q}

    def draw(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.tables)))

    def drop(self, holder: str) -> list[int]:
        del self.chains[holder], self.num_full[holder]
        return self.tables.pop(holder)

    def take(self, holder: str, num_new: int, cached: list[int]) -> bool:
        """Allocate if the pool can, and compare with the model; return whether it could."""
        num_needed = num_new + len(self.free & set(cached))
        assert self.pool.can_allocate(num_new, cached) is (num_needed <= len(self.free))
        if num_needed > len(self.free):
            return False
        free = self.free
        got = self.pool.allocate(holder, num_new, cached)
        taken = got[len(cached) :]
        assert got[: len(cached)] == cached and set(taken) <= free - set(cached)
        assert len(set(taken)) == num_new
        for block in taken:
            self.contents.pop(block, None)
        self.tables.setdefault(holder, []).extend(got)
        return True

    @rule(
        words=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=4),
        salt=st.sampled_from(SALTS),
        is_reusing=st.booleans(),
    )
    def hold(self, words: list[int], salt: str, is_reusing: bool) -> None:
        """Each word is a block's content; what is cached is referenced, the rest is to be computed."""
        chain = full_block_hashes(root_hash("model", salt), [w for w in words for _ in range(SIZE)], SIZE)
        cached = self.pool.find_cached(chain)
        assert [self.contents[block] for block in cached] == chain[: len(cached)]
        if not is_reusing:
            cached = []
        self.num_holders += 1
        holder = f"h{self.num_holders}"
        if self.take(holder, len(chain) - len(cached), cached):
            self.chains[holder], self.num_full[holder] = chain, len(cached)

    @precondition(lambda self: any(self.num_full[h] < len(self.chains[h]) for h in self.tables))
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """One more block is full: it may be found from now on."""
        behind = [h for h in sorted(self.tables) if self.num_full[h] < len(self.chains[h])]
        holder = data.draw(st.sampled_from(behind))
        position = self.num_full[holder]
        block, block_hash = self.tables[holder][position], self.chains[holder][position]
        self.pool.enter(holder, position, [block_hash])
        if block_hash not in self.contents.values():
            self.contents[block] = block_hash
        self.num_full[holder] += 1
        assert len(self.pool.find_cached([block_hash])) == 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), num=st.integers(1, 3))
    def grow(self, data: st.DataObject, num: int) -> None:
        """On demand (A14); the new blocks are never full here."""
        self.take(self.draw(data), num, [])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = self.draw(data)
        self.pool.free(holder)
        self.drop(holder)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def lend(self, data: st.DataObject) -> None:
        old = self.draw(data)
        new = f"lease:{old}"
        self.pool.hand_over(old, new)
        self.chains[new], self.num_full[new] = self.chains[old], self.num_full[old]
        self.tables[new] = self.drop(old)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def forget_content(self, data: st.DataObject) -> None:
        """It is corrupt (B14): held still, found no more."""
        holder = self.draw(data)
        self.pool.forget_content(holder)
        for block in self.tables[holder]:
            self.contents.pop(block, None)

    @rule(num=st.integers(1, 4), words=st.lists(st.sampled_from([1, 2]), max_size=2))
    def read_and_cancel(self, num: int, words: list[int]) -> None:
        """Destinations behind a cached prefix: only they are quarantined."""
        chain = full_block_hashes(root_hash("model", ""), [w for w in words for _ in range(SIZE)], SIZE)
        cached = self.pool.find_cached(chain)
        self.num_holders += 1
        reader = f"q{self.num_holders}"
        if self.take(reader, num, cached):
            self.pool.quarantine(reader, len(cached))
            self.quarantined[reader] = self.tables.pop(reader)[len(cached) :]

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(sorted(self.quarantined)))
        self.pool.release_quarantine(reader)
        del self.quarantined[reader]

    @rule()
    def reset(self) -> None:
        is_idle = len(self.free) == NUM_BLOCKS - 1
        assert self.pool.reset_prefix_cache() is is_idle
        if is_idle:
            self.contents.clear()

    @invariant()
    def books_are_right(self) -> None:
        """The pool's own check, and the model's view of tables, states and contents (law 1)."""
        self.pool.check_integrity()
        assert {holder: self.pool.table_of(holder) for holder in self.pool.holders()} == self.tables
        assert self.pool.num_free_blocks == len(self.free)
        num_quarantined = sum(map(len, self.quarantined.values()))
        assert self.pool.count_by_state() == {
            "null": 1,
            "free": len(self.free),
            "held": len(self.held),
            "quarantined": num_quarantined,
        }
        for block, block_hash in self.contents.items():
            assert self.pool.find_cached([block_hash]) == [block]

    def teardown(self) -> None:
        for holder in list(self.tables):
            self.pool.free(holder)
        for reader in self.quarantined:
            self.pool.release_quarantine(reader)
        assert self.pool.num_free_blocks == self.pool.num_usable_blocks and self.pool.usage == 0.0
        self.pool.check_integrity()


TestPool = machine_test(PoolMachine, 80, 40)
