"""Engines of two ranks with KV tiers: the same tokens with cramped pools, damaged files, and after restarts."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.client import EngineClient, InProcessClient
from engine.compute.forward import MakeForward
from engine.executor import Executor
from engine.kv_cache.startup import initialize_kv_cache
from engine.kv_tiers.slab import Slab
from engine.settings import EngineSettings
from engine.startup import ExecutorStart, start_executor
from tests.checkpoints import make_checkpoint
from tests.engine_scheduling.test_real_runner import answers
from tests.fakes.engine.graphs import FakeDeviceGraphs
from tests.fakes.engine.local_ranks import LocalRanksExecutor

pytestmark = pytest.mark.timeout(300)
"""Each of several processes loads torch, perhaps while other tests run."""


def ranks_as_threads(
    settings: EngineSettings, make_forward: MakeForward | None = None
) -> tuple[Executor, int]:
    ranks = LocalRanksExecutor(settings, make_forward=make_forward)
    return ranks, initialize_kv_cache(ranks)[0]


HOWEVER_RANKS_RUN = pytest.mark.parametrize(
    "start", [ranks_as_threads, pytest.param(start_executor, marks=pytest.mark.slow)], ids=["threads", "gloo"]
)


@asynccontextmanager
async def started(
    settings: EngineSettings, start: ExecutorStart = start_executor
) -> AsyncIterator[EngineClient]:
    client = await InProcessClient.start(settings, start=start)
    try:
        yield client
    finally:
        await client.shutdown()


async def count(client: EngineClient, tier: str, name: str) -> int:
    counted: dict[str, int] = await client.call("counters")
    return counted[f"kv_tier_{name}{{tier={tier}}}"]


def damage(file: Path) -> None:
    """Flip a bit of each block in a slab."""
    slab = Slab.open(file)
    header = slab.header
    slots = [slot for slot, _ in slab.entries()]
    slab.close()
    with file.open("r+b") as stream:
        for slot in slots:
            place = header.first_slot + slot * header.slot_bytes + 7
            stream.seek(place)
            (byte,) = stream.read(1)
            stream.seek(place)
            stream.write(bytes([byte ^ 1]))


async def alone(shape: dict[str, Any]) -> tuple[list[list[int]], int]:
    """Return the answers of an engine of one rank with room, without tiers, and the bytes of its blocks."""
    async with started(EngineSettings(kv_cache_bytes=2**22, **shape)) as roomy:
        return await answers(roomy), roomy.info.layout.block_bytes


def cramped(shape: dict[str, Any], block_bytes: int) -> dict[str, Any]:
    """Return the settings of an engine of two ranks that preempts."""
    small = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "kv_cache_bytes": 6 * block_bytes}
    return {**shape, **small, "tensor_parallel_size": 2}


@HOWEVER_RANKS_RUN
async def test_two_ranks_with_tiers_give_the_tokens_of_one_without(
    tmp_path: Path, start: ExecutorStart
) -> None:
    """A17: under preemption, after a restart, and with damaged files of one rank, whose blocks are computed anew."""
    shape = {"model": make_checkpoint(tmp_path / "model"), "dtype": "float32", "max_model_len": 80}
    expected, block_bytes = await alone(shape)
    disk = {"disk_kv_dir": tmp_path / "kv", "disk_kv_bytes": 70 * block_bytes}
    on_disk = cramped(shape, block_bytes) | disk
    async with started(EngineSettings(host_kv_bytes=8 * block_bytes, **on_disk), start) as client:
        for _ in range(3):
            assert await answers(client) == expected
        assert (await client.call("counters"))["num_preemptions_total"] > 0
        assert await count(client, "host", "loaded_blocks_total") > 0
        assert 0 < await count(client, "host", "bytes") <= 8 * block_bytes
        num_bytes, num_stored = [await count(client, "disk", one) for one in ("bytes", "stored_blocks_total")]
        assert num_bytes == num_stored * block_bytes
        for tier in ("host", "disk"):
            assert await count(client, tier, "failed_blocks_total") == 0
    files = sorted((tmp_path / "kv").rglob("*.slab"))
    assert [file.parent.name for file in files] == ["rank-0", "rank-1"]
    async with started(EngineSettings(**on_disk), start) as restarted:
        assert await answers(restarted) == expected
        assert await count(restarted, "disk", "loaded_blocks_total") > 0
        assert await count(restarted, "disk", "failed_blocks_total") == 0
        damage(files[1])
        assert await answers(restarted) == expected
        assert await count(restarted, "disk", "failed_blocks_total") > 0


async def test_ranks_that_run_ahead_give_blocks_back(tmp_path: Path) -> None:
    """A17: orders come with steps that are begun before the results of the one before are read."""
    shape = {"model": make_checkpoint(tmp_path / "model"), "dtype": "float32", "max_model_len": 80}
    expected, block_bytes = await alone(shape)
    settings = EngineSettings(host_kv_bytes=40 * block_bytes, **cramped(shape, block_bytes))
    async with started(settings, partial(ranks_as_threads, make_forward=FakeDeviceGraphs)) as client:
        for _ in range(3):
            assert await answers(client) == expected
        assert await count(client, "host", "loaded_blocks_total") > 0
        assert await count(client, "host", "failed_blocks_total") == 0


@HOWEVER_RANKS_RUN
async def test_two_ranks_with_kv_of_another_dtype_give_the_tokens_of_one(
    tmp_path: Path, start: ExecutorStart
) -> None:
    """D12: each rank converts its own heads; with preempted requests whose blocks a tier gives back."""
    shape = {
        "model": make_checkpoint(tmp_path / "model"),
        "dtype": "float32",
        "kv_cache_dtype": "bfloat16",
        "max_model_len": 80,
    }
    expected, block_bytes = await alone(shape)
    settings = EngineSettings(host_kv_bytes=40 * block_bytes, **cramped(shape, block_bytes))
    async with started(settings, start) as client:
        layout = client.info.layout
        assert (layout.dtype, 2 * layout.block_bytes) == ("bfloat16", block_bytes)
        for _ in range(2):
            assert await answers(client) == expected
        assert await count(client, "host", "loaded_blocks_total") > 0
        assert await count(client, "host", "failed_blocks_total") == 0
