"""Write-behind: which blocks are stored in a tier and when, in order of their eviction, and what a preemption waits for."""

from collections.abc import Sequence

from contract.block_hash import BlockHash
from engine.scheduling.blocks.block_pool import BlockPool
from engine.scheduling.tiers.tier import Tier
from engine.scheduling.tiers.write_behind import WriteBehind, watermark
from tests.engine_scheduling.stepping import SteppedEngine, fake_request
from tests.fakes.engine.fakes import fake_answer
from tests.fakes.engine.memory import FakeMemory
from tests.fakes.engine.tiers import FakeTierStorage


class Rig:
    """A pool of ``num_blocks`` usable blocks and a tier, of which 8 blocks are guarded; tables: of those that run."""

    def __init__(self, num_blocks: int = 32, num_slots: int = 64) -> None:
        self.pool = BlockPool(num_blocks + 1, 4)
        self.storage = FakeTierStorage(FakeMemory(num_blocks + 1, 4), num_slots)
        self.writer = WriteBehind(Tier(self.storage), self.pool, 8, lambda: None)
        self.tables: list[Sequence[int]] = []
        self.num_spare = 99

    def compute(self, holder: str, *hashes: BlockHash) -> list[int]:
        """Let a request compute blocks with this content, which are offered."""
        self.pool.allocate(holder, len(hashes))
        blocks = self.pool.enter(holder, 0, hashes)
        self.writer.offer(blocks, hashes)
        return blocks

    def advance(self, *, is_idle: bool = False) -> list[list[BlockHash]]:
        """Go on behind a step; return the content of each store so far."""
        self.writer.advance(lambda: self.num_spare, lambda: self.tables, is_idle=is_idle)
        self.writer.check_integrity()
        self.pool.check_integrity()
        return [[copy.block_hash for copy in copies] for copies in self.storage.stores]


def hashes_of(name: str, count: int) -> list[BlockHash]:
    return [f"{name}{number}".encode() for number in range(count)]


def test_the_watermark_is_a_share_of_the_pool_and_room_for_two_steps() -> None:
    assert watermark(8000, 100) == 1000
    assert watermark(800, 100) == 200
    assert watermark(60, 100) == 60


def test_a_pool_with_room_stores_nothing_while_a_request_runs() -> None:
    """A17: nothing is about to be lost; an idle engine stores the rest, so that a later hurry has less to do."""
    engine = SteppedEngine(
        with_connector=False, kv_cache_bytes=64, host_kv_bytes=99, max_num_batched_tokens=8
    )
    storage = engine.executor.tiers[0]
    engine.add(fake_request("a", [1] * 6, 40))
    engine.step(35)
    assert engine.request_counts() == (1, 0) and engine.pool.num_free_blocks > 50
    assert storage.stores == []
    engine.run()
    assert sum(map(len, storage.stores)) == 45 // 4


def test_blocks_are_stored_in_the_order_of_their_eviction_when_their_turn_comes() -> None:
    """The list of free blocks is searched again when half of the guarded ones have left it."""
    rig = Rig()
    first = hashes_of("a", 4)
    rig.compute("a", *first)
    rig.compute("b", *hashes_of("b", 4))
    rig.pool.free("a")
    rig.pool.free("b")
    rig.advance()
    rig.pool.allocate("r", 16)
    assert rig.advance() == [], "8 blocks without content are taken before them"
    rig.pool.allocate("r", 3)
    assert rig.advance() == [], "4 are clean still"
    rig.pool.allocate("r", 1)
    assert rig.advance() == [first[::-1]]
    assert rig.advance() == [first[::-1]]
    rig.pool.allocate("r", 5)
    assert rig.advance() == [first[::-1], [b"b3", b"b2", b"b1", b"b0"]]


def test_a_copy_of_free_blocks_does_not_change_their_turn() -> None:
    rig = Rig(num_blocks=16)
    rig.compute("a", b"a0", b"a1")
    rig.pool.free("a")
    rig.pool.allocate("r", 12)
    turns = rig.pool.next_blocks(16)
    rig.storage.is_late = True
    assert rig.advance() == [[b"a1", b"a0"]]
    assert len(rig.pool.next_blocks(16)) == 2
    rig.storage.settle()
    rig.advance()
    assert rig.pool.next_blocks(16) == turns


def test_blocks_of_the_request_that_is_preempted_first_are_stored_first() -> None:
    """A17: below the watermark the copies are ahead of the preemptions, and no further than the watermark."""
    rig = Rig(num_blocks=16)
    tables = [rig.compute(name, *hashes_of(name, 5)) for name in "abc"]
    rig.tables = [*reversed(tables)]
    assert rig.advance() == [[b"c4", b"c3"]], "two blocks at a time, of a pool so small"
    stores = [rig.advance() for _ in range(9)][-1]
    assert [one for copies in stores for one in copies] == [
        *hashes_of("c", 5)[::-1],
        *hashes_of("b", 5)[::-1],
    ]


def test_a_free_block_is_held_for_a_copy_only_if_it_is_spare() -> None:
    rig = Rig(num_blocks=8)
    rig.compute("r", b"h")
    rig.pool.free("r")
    rig.num_spare = 0
    assert rig.advance(is_idle=True) == []
    rig.num_spare = 1
    assert rig.advance(is_idle=True) == [[b"h"]]


def test_a_preemption_waits_until_all_blocks_of_its_request_are_stored() -> None:
    """A17: also if no copy was made in time, less than a block is recomputed."""
    engine = SteppedEngine(with_connector=False, kv_cache_bytes=8, host_kv_bytes=32, max_model_len=24)
    storage = engine.executor.tiers[0]
    storage.is_late = True
    engine.add(fake_request("a", [1] * 6, 16), fake_request("b", [2] * 6, 16))
    while not engine.scheduler.make_stats().num_swapped_reqs:
        assert len(engine.tokens("a#0.0")) < 16, "it was computed without a preemption"
        engine.step()
    (victim,) = engine.scheduler.queues.waiting
    num_full = (victim.num_tokens - 1) // 4
    stored = {block_hash for _, block_hash in storage.contents.values()}
    assert num_full >= 2 and stored.issuperset(victim.block_hashes[:num_full])
    storage.is_late = False
    storage.settle()
    engine.run()
    num_preempted = engine.core.call("counters", [])["num_preemptions_total"]
    num_again = sum(engine.executor.runner.batch_sizes) - 2 * (6 + 16 - 1)
    assert 0 <= num_again < 4 * num_preempted
    assert engine.tokens("b#0.0") == fake_answer([2] * 6, 16)


def test_a_preemption_does_not_wait_for_a_tier_that_hangs() -> None:
    """Law 4: the blocks that it has not copied are computed again."""
    engine = SteppedEngine(with_connector=False, kv_cache_bytes=8, host_kv_bytes=32, max_model_len=24)
    storage = engine.executor.tiers[0]
    storage.is_late = True
    storage.hangs = True
    engine.add(fake_request("a", [1] * 6, 16), fake_request("b", [2] * 6, 16))
    while not engine.core.call("counters", [])["num_preemptions_total"]:
        engine.step()
    assert storage.contents == {}
    engine.run()
    storage.is_late = False
    storage.hangs = False
    storage.settle()
    engine.run()
    assert engine.tokens("a#0.0") == fake_answer([1] * 6, 16)
    assert engine.tokens("b#0.0") == fake_answer([2] * 6, 16)
