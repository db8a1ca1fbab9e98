"""The KV tiers of several ranks as one: each rank has a pool, storages and a pipe of its own, in this process."""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pipe
from pathlib import Path

import pytest

from contract.errors import InternalError, SettingError
from engine.kv_cache.memory import PagedKVMemory
from engine.kv_tiers.disk import DiskTier
from engine.kv_tiers.host import HostTier
from engine.kv_tiers.orders import TierOrder
from engine.kv_tiers.rank_tiers import RankTiers
from engine.kv_tiers.slab import Slab
from engine.kv_tiers.storage import BlockCopy, RankPlace, TierStorage
from engine.kv_tiers.tier_group import GroupTier, TierGroup
from tests.fakes.engine.memory import FakeMemory
from tests.fakes.engine.tiers import FakeTierStorage
from tests.tier_pools import LAYOUT, content, hash_of, pool_of

MODEL = "model@bfloat16"
ROOM = 2**16
Opening = Callable[[PagedKVMemory, int, Callable[[str], None]], TierStorage]
"""(pool, rank, what is called if the disk fails) → the rank's storage."""


class Ranks:
    """Two ranks whose pools differ, and the group of their tiers. Orders wait for ``step`` or ``settle``."""

    def __init__(self, opening: Opening) -> None:
        self.memories = [pool_of() for _ in range(2)]
        self.memories[1].pool[:] *= 2
        self.has_room = True
        self._opening = opening
        self.storages: list[TierStorage] = []
        ours, self.pipes = zip(*(Pipe(duplex=False) for _ in range(2)), strict=True)
        self.group = TierGroup(ours, self._send_now)
        try:
            self.ranks = [RankTiers(partial(self._open, rank), self.pipes[rank]) for rank in range(2)]
        except SettingError:
            for storage in self.storages:
                storage.close()
            self._end()
            raise
        (self.tier,) = self.group.open([rank.opened() for rank in self.ranks])

    def step(self) -> None:
        """Let the orders that wait travel with a step."""
        self._send(self.group.pop_orders())

    def result(self, copy: "Future[int]") -> int:
        """Let the orders that wait travel with a step, and return the result of a copy."""
        self.step()
        return copy.result(60)

    def close(self) -> None:
        """End the ranks, and then the group."""
        self.step()
        for rank in self.ranks:
            rank.close()
        self._end()

    def _end(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        self.group.close()
        for memory in self.memories:
            memory.close()

    def _open(self, rank: int, on_failure: Callable[[str], None]) -> list[TierStorage]:
        self.storages.append(self._opening(self.memories[rank], rank, on_failure))
        return self.storages[-1:]

    def _send_now(self, orders: list[TierOrder]) -> bool:
        if self.has_room:
            self._send(orders)
        return self.has_room

    def _send(self, orders: list[TierOrder]) -> None:
        for rank in self.ranks:
            rank.carry_out(orders)


@contextmanager
def started(opening: Opening) -> Iterator[tuple[Ranks, GroupTier]]:
    ranks = Ranks(opening)
    try:
        yield ranks, ranks.tier
    finally:
        ranks.close()


def host(memory: PagedKVMemory, rank: int, on_failure: Callable[[str], None]) -> HostTier:
    return HostTier(memory, 8 * 2 * LAYOUT.block_bytes, 2**30, num_ranks=2)


def disk(folder: Path, num_ranks: int = 2) -> Opening:
    """Return what opens a disk tier. num_ranks: of the engine that it was made for."""
    return lambda memory, rank, on_failure: DiskTier(
        memory, folder, ROOM * num_ranks, MODEL, RankPlace(rank, num_ranks), on_failure
    )


class Late(FakeTierStorage):
    """A storage whose copies are made one by one, and whose content is of no interest."""

    def __init__(self) -> None:
        super().__init__(FakeMemory(9, 4), 8)
        self.is_late = True


@contextmanager
def late_ranks() -> Iterator[tuple[Ranks, GroupTier, list[Late]]]:
    storages = [Late(), Late()]
    with started(lambda memory, rank, on_failure: storages[rank]) as (ranks, tier):
        yield ranks, tier, storages


COPIES = [BlockCopy(block, block - 1, hash_of(block)) for block in range(1, 5)]


def test_each_rank_keeps_its_own_part_of_a_block() -> None:
    """A17: a block has its bytes on all ranks, which share the memory; slots are the same everywhere."""
    with started(host) as (ranks, tier):
        assert (tier.num_slots, tier.slot_bytes) == (8, 2 * LAYOUT.block_bytes)
        kept = [content(memory, 1, 2, 3, 4) for memory in ranks.memories]
        assert kept[0] != kept[1]
        assert ranks.result(tier.store(COPIES)) == 4
        for memory in ranks.memories:
            memory.pool.zero_()
        back = [copy._replace(block_id=place) for place, copy in zip((5, 4, 8, 2), COPIES, strict=True)]
        assert ranks.result(tier.load(back)) == 4
        assert [content(memory, 5, 4, 8, 2) for memory in ranks.memories] == kept


@pytest.mark.parametrize("rank", [0, 1])
def test_a_block_that_is_damaged_on_one_rank_is_damaged(rank: int) -> None:
    """Law 3: what comes before it is used, and nothing else."""
    with started(host) as (ranks, tier):
        assert ranks.result(tier.store(COPIES)) == 4
        storage = ranks.storages[rank]
        assert isinstance(storage, HostTier)
        storage.slot_view(2)[7] ^= 1
        assert ranks.result(tier.load(COPIES)) == 2


def test_orders_travel_with_a_step_and_a_preemption_sends_them_at_once() -> None:
    """A17: they come behind the steps that were begun before; none is lost while the ring has no room."""
    with started(host) as (ranks, tier):
        stored = tier.store(COPIES)
        assert (tier.has_orders, stored.done()) == (True, False)
        ranks.has_room = False
        assert (tier.settle(0.01), tier.has_orders) == (False, True)
        loaded = tier.load(COPIES[:1])
        ranks.has_room = True
        assert (tier.settle(10), tier.has_orders) == (True, False)
        assert (stored.result(), loaded.result()) == (4, 1)
        assert tier.settle()


def test_a_copy_is_over_when_all_ranks_have_ended_it() -> None:
    """Law 2: its blocks are written until then, whatever one rank reports."""
    with late_ranks() as (ranks, tier, (first, second)):
        stored = tier.store(COPIES)
        ranks.step()
        second.num_stores_kept = 3
        first.carry_out()
        assert not tier.settle(0.05) and not stored.done()
        second.carry_out()
        assert stored.result(60) == 3, "a block is stored if all ranks have it"


def test_a_load_that_was_cancelled_is_over_when_no_rank_copies() -> None:
    """Law 2: a rank that has begun ends its copy, and the blocks stay in quarantine until then."""
    with late_ranks() as (ranks, tier, (first, second)):
        assert tier.store(COPIES) and tier.has_orders
        ranks.step()
        first.carry_out()
        second.carry_out()
        loaded = tier.load(COPIES)
        ranks.step()
        first.begin()
        assert not loaded.cancel()
        ranks.step()
        assert not second.has_jobs and not tier.settle(0.05) and not loaded.done()
        first.carry_out()
        assert tier.settle(60) and loaded.cancelled()
        assert not loaded.cancel() and not tier.has_orders


class Broken(Late):
    """A storage with a bug."""

    def load(self, copies: Sequence[BlockCopy]) -> "Future[int]":
        """Fail."""
        failed: Future[int] = Future()
        failed.set_exception(KeyError("slot"))
        return failed


def test_a_bug_on_a_rank_is_an_error_of_the_engine() -> None:
    storages = [Late(), Broken()]
    with started(lambda memory, rank, on_failure: storages[rank]) as (ranks, tier):
        loaded = tier.load([])
        ranks.step()
        storages[0].carry_out()
        with pytest.raises(InternalError, match=r"a copy of a KV tier failed on rank 1: KeyError\('slot'\)"):
            loaded.result(60)


def test_no_caller_waits_for_a_rank_that_has_ended() -> None:
    """Copies end without a result, and so do later ones; the executor reports the death."""
    with late_ranks() as (ranks, tier, _):
        stored = tier.store(COPIES)
        ranks.step()
        ranks.pipes[1].close()
        assert stored.result(60) == 0
        assert tier.load(COPIES).result(60) == 0
        assert tier.settle()


def test_a_restart_finds_what_all_ranks_have(tmp_path: Path) -> None:
    """A17: in a folder for each rank; a rank that was killed behind the others decides what can be found."""
    with started(disk(tmp_path)) as (ranks, tier):
        assert tier.found == [] and tier.outlives_engine
        kept = [content(memory, 1, 2, 3, 4) for memory in ranks.memories]
        assert ranks.result(tier.store([COPIES[3], *COPIES[:3]])) == 4
        tier.forget([0])
    files = [tmp_path / f"rank-{rank}" / "kv-0000.slab" for rank in range(2)]
    assert sum(file.stat().st_size for file in files) <= 2 * ROOM
    slab = Slab.open(files[1])
    slab.clear(2)
    slab.close()
    with started(disk(tmp_path)) as (ranks, tier):
        assert tier.found == [(hash_of(4), 3), (hash_of(2), 1)]
        for memory in ranks.memories:
            memory.pool.zero_()
        assert ranks.result(tier.load([COPIES[3], COPIES[1]])) == 2
        assert [content(memory, 4, 2) for memory in ranks.memories] == [[one[3], one[1]] for one in kept]
        tier.restart("newer@bfloat16")
    with started(disk(tmp_path)) as (_, tier):
        assert tier.found == []


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_files_of_another_number_of_ranks_are_left_alone(
    tmp_path: Path, num_ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Law 1: also if a rank's part of a block looks alike, as with KV heads of which each rank has a copy."""
    folder = tmp_path if num_ranks > 1 else tmp_path / "rank-0"
    with started(disk(tmp_path)) as (ranks, tier):
        assert ranks.result(tier.store(COPIES)) == 4
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.slab")}
    memory = pool_of()
    other = DiskTier(memory, folder, 3 * ROOM, MODEL, RankPlace(0, num_ranks))
    assert other.found == []
    assert other.store(COPIES[:1]).result() == 1
    other.close()
    memory.close()
    assert "of rank 0 of 2 (version 1)" in caplog.text
    assert {file: file.read_bytes() for file in before} == before
    with started(disk(tmp_path)) as (_, tier):
        assert len(tier.found) == 4


class Failing(FakeTierStorage):
    """A disk that fails at its first store."""

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        super().__init__(FakeMemory(9, 4), 8, "disk")
        self._on_failure = on_failure

    def store(self, copies: Sequence[BlockCopy]) -> "Future[int]":
        """Fail."""
        self._on_failure("it is full")
        self.is_off = True
        return super().store(copies)


@pytest.mark.parametrize("num_failing", [1, 2])
def test_a_disk_that_fails_on_a_rank_turns_the_tier_off_with_one_warning(
    num_failing: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A17: nothing fails but the copies, and no rank is asked any more."""

    def opening(memory: PagedKVMemory, rank: int, on_failure: Callable[[str], None]) -> TierStorage:
        return (
            Failing(on_failure) if rank >= 2 - num_failing else FakeTierStorage(FakeMemory(9, 4), 8, "disk")
        )

    with started(opening) as (ranks, tier):
        assert ranks.result(tier.store(COPIES[2:])) == 0 and tier.is_off
        assert tier.store(COPIES[2:]).result() == tier.load(COPIES[:1]).result() == 0
        assert not tier.has_orders
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert len(warnings) == 1 and warnings[0].endswith("of 2: it is full")


def test_a_size_for_all_ranks_is_refused_as_a_whole(tmp_path: Path) -> None:
    """An error names what the user has set; the ranks that have opened theirs close it."""
    memory = pool_of()
    block = LAYOUT.block_bytes
    too_small = 2 * block - 1
    with pytest.raises(
        SettingError, match=f"host_kv_bytes is {too_small} bytes, and one block has {2 * block};"
    ):
        HostTier(memory, too_small, 2**30, num_ranks=2)
    with pytest.raises(
        SettingError, match=r"disk_kv_bytes is 9000 bytes, .* has 8960 on each of 2 ranks; raise"
    ):
        DiskTier(memory, tmp_path, 9000, MODEL, RankPlace(1, 2))
    memory.close()
    occupied = DiskTier(memory, tmp_path, 2 * ROOM, MODEL, RankPlace(1, 2))
    with pytest.raises(SettingError, match=r"disk_kv_dir is .*/rank-1, which another engine uses"):
        Ranks(disk(tmp_path))
    occupied.close()
