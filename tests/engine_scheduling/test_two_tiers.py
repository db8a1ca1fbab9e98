"""A tier on a disk beside the one in host memory: which of them has a block, and what survives the engine."""

from pathlib import Path
from typing import Any

import pytest

from contract.errors import SettingError
from engine.scheduling.requests.finish import RequestStatus
from tests.engine_scheduling.stepping import SteppedEngine, fake_request, fake_settings
from tests.fakes.engine.fakes import NAN_TOKEN, fake_answer
from worker.settings import WorkerSettings

PROMPT = [5] * 13


def engine_with_tiers(num_host: int = 32, num_disk: int = 64, **changes: Any) -> SteppedEngine:
    return SteppedEngine(
        **{
            "with_connector": False,
            "kv_cache_bytes": 8,
            "host_kv_bytes": num_host,
            "disk_kv_dir": "disk",
            "disk_kv_bytes": num_disk,
            "max_model_len": 28,
            **changes,
        }
    )


def evict(engine: SteppedEngine) -> None:
    """Let another request use the whole pool."""
    number = sum(engine.executor.runner.batch_sizes)
    engine.add(fake_request(f"filler{number}", [7 + number] * 27, 1))
    engine.run()


def test_blocks_that_host_memory_has_no_room_for_come_from_the_disk() -> None:
    """A17: one load has its parts from several tiers, and the faster one stores what came from the other."""
    engine = engine_with_tiers(num_host=7)
    host, disk = engine.executor.tiers
    engine.add(fake_request("first", PROMPT, 1))
    engine.run()
    evict(engine)
    assert len(host.contents) == 7 and len(disk.contents) == 9
    engine.add(fake_request("again", PROMPT, 2))
    engine.run()
    assert [len(copies) for copies in (*host.loads, *disk.loads)] == [1, 2]
    stored = {block_hash for _, block_hash in host.contents.values()}
    assert stored.issuperset(copy.block_hash for copy in disk.loads[0])
    assert engine.tokens("again#0.0") == fake_answer(PROMPT, 2)
    counted = engine.core.call("counters", [])
    assert counted["kv_tier_loaded_blocks_total{tier=disk}"] == 2
    assert counted["kv_tier_bytes{tier=disk}"] == len(disk.contents)


def test_a_preemption_waits_for_one_tier() -> None:
    """A16, A17: swapped means that host memory has it; the slower one stores it in its turn."""
    engine = engine_with_tiers()
    host, disk = engine.executor.tiers
    host.is_late = True
    disk.is_late = True
    engine.add(fake_request("a", [1] * 6, 16), fake_request("b", [2] * 6, 16))
    while not engine.scheduler.make_stats().num_swapped_reqs:
        assert len(engine.tokens("a#0.0")) < 16, "it was computed without a preemption"
        engine.step()
    (victim,) = engine.scheduler.queues.waiting
    own = set(victim.block_hashes)
    assert len(own.intersection(block_hash for _, block_hash in host.contents.values())) >= 2
    assert len(own.intersection(block_hash for _, block_hash in disk.contents.values())) < 2


def test_a_disk_that_has_failed_is_asked_for_nothing() -> None:
    engine = engine_with_tiers(num_host=0)
    (disk,) = engine.executor.tiers
    engine.add(fake_request("first", PROMPT, 1))
    engine.run()
    evict(engine)
    assert disk.stores and not disk.loads
    disk.is_off = True
    num_stores = len(disk.stores)
    engine.add(fake_request("again", PROMPT, 2), fake_request("other", [9] * 8, 8))
    engine.run()
    assert engine.tokens("again#0.0") == fake_answer(PROMPT, 2)
    assert not disk.loads and len(disk.stores) == num_stores


def test_corrupt_content_is_dropped_from_the_files_too() -> None:
    """Law 1: a later engine does not find it, even if it was being stored."""
    engine = engine_with_tiers(num_host=0, max_num_batched_tokens=10)
    (disk,) = engine.executor.tiers
    disk.is_late = True
    engine.add(fake_request("bad", [3] * 10 + [NAN_TOKEN], 2))
    engine.step()
    (copies,) = disk.stores
    engine.step()
    assert engine.end("bad#0.0").error_kind == "internal"
    disk.is_late = False
    disk.settle()
    engine.run()
    assert set(disk.forgotten).issuperset(copy.slot for copy in copies)


def test_damaged_content_is_dropped_from_the_files_too() -> None:
    engine = engine_with_tiers(num_host=0)
    (disk,) = engine.executor.tiers
    engine.add(fake_request("first", PROMPT, 1))
    engine.run()
    evict(engine)
    slot = disk.stores[0][0].slot
    disk.damage(slot)
    engine.add(fake_request("again", PROMPT, 2))
    engine.run()
    assert disk.forgotten == [slot]


def test_the_end_of_an_engine_stores_what_is_left() -> None:
    """A17: also of requests that run; host memory would not keep it."""
    engine = engine_with_tiers(kv_cache_bytes=64, max_num_batched_tokens=8)
    host, disk = engine.executor.tiers
    engine.add(fake_request("first", PROMPT, 6))
    while len(engine.tokens("first#0.0")) < 5:
        engine.step()
    assert host.stores == disk.stores == []
    engine.core.shutdown()
    assert host.stores == []
    assert sum(map(len, disk.stores)) == len(disk.contents) == 4


def test_the_end_of_an_engine_does_not_wait_for_a_disk_that_hangs() -> None:
    engine = engine_with_tiers(kv_cache_bytes=64, max_num_batched_tokens=8)
    disk = engine.executor.tiers[1]
    disk.is_late = True
    disk.hangs = True
    engine.add(fake_request("first", PROMPT, 6))
    engine.step(5)
    assert engine.scheduler.requests["first#0.0"].status is RequestStatus.RUNNING
    engine.scheduler.shutdown()
    assert disk.contents == {}


def test_an_idle_engine_takes_a_step_for_orders_to_its_ranks() -> None:
    """A17: a tier of several ranks gives its orders to the next step."""
    engine = engine_with_tiers()
    _, disk = engine.executor.tiers
    assert not engine.core.needs_step()
    disk.has_orders = True
    assert engine.core.needs_step()


def test_no_disk_tier_without_prefix_caching() -> None:
    with pytest.raises(SettingError, match=r"disk_kv_dir is disk.*enable_prefix_caching, or leave it unset"):
        fake_settings(disk_kv_dir="disk", enable_prefix_caching=False)


@pytest.mark.parametrize(
    ("worker_id", "folder"), [("decode-0", "kv/decode-0"), ("a/b", "kv/a_b"), (None, "kv")]
)
def test_each_worker_of_a_service_has_its_own_folder(worker_id: str | None, folder: str) -> None:
    """A17: they have the same settings, and a folder serves one engine."""
    given = WorkerSettings(model=Path("m"), worker_id=worker_id, disk_kv_dir=Path("kv"))
    assert given.engine_settings().disk_kv_dir == Path(folder)
    assert WorkerSettings(model=Path("m"), worker_id=worker_id).engine_settings().disk_kv_dir is None
