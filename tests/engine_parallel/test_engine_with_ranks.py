"""Whole engines over two rank processes: both clients, chunks, prefix cache, preemption, and deaths."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from contract.requests import EngineRequest, Grammar, SamplingParams
from engine.client import EngineClient, InProcessClient, ProcessClient
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.timeout(300)
"""Several processes each load torch, perhaps beside other tests."""

NUM_TOKENS = 10
SHARED = [(7 * n) % 250 for n in range(40)]
PROMPTS = [[3], SHARED[:16], SHARED, [*SHARED, 9, 9], [*SHARED[:20], 1, 2, 3], [200, 100] * 15]
WAYS = [
    SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS),
    SamplingParams(temperature=1.5, top_p=0.95, seed=11, max_tokens=NUM_TOKENS),
    SamplingParams(seed=5, max_tokens=NUM_TOKENS, grammar=Grammar("regex", "[a-z]{4}(-[0-9]+)*")),
]
CRAMPED = {"max_num_batched_tokens": 16, "max_model_len": 80, "max_num_seqs": 4}


@asynccontextmanager
async def started(kind: Any, model: Path, **settings: Any) -> AsyncIterator[Any]:
    defaults = {"kv_cache_bytes": 2**22, "dtype": "float32", "tensor_parallel_size": 2}
    client = await kind.start(EngineSettings(model=model, **{**defaults, **settings}))
    try:
        yield client
    finally:
        await client.shutdown()


async def answers(client: EngineClient) -> list[list[int]]:
    async def one(index: int, prompt: list[int], sampling: SamplingParams) -> list[int]:
        request = EngineRequest(request_id=f"r{index}", prompt_token_ids=prompt, sampling=sampling)
        return [token async for output in client.generate(request) for token in output.token_ids]

    asked = [(prompt, sampling) for sampling in WAYS for prompt in PROMPTS]
    return await asyncio.gather(*(one(index, *each) for index, each in enumerate(asked)))


async def assert_two_ranks_answer_as_one(model: Path) -> None:
    """A roomy engine with ranks in a process, asked twice; a cramped one in a thread; beside one rank."""
    async with started(InProcessClient, model, tensor_parallel_size=1) as alone:
        expected = await answers(alone)
        block_bytes = alone.info.layout.block_bytes
    assert len(set(map(tuple, expected))) > len(PROMPTS)
    async with started(ProcessClient, model) as roomy:
        assert roomy.info.layout.num_kv_heads * 2 == alone.info.layout.num_kv_heads
        assert roomy.info.num_blocks == alone.info.num_blocks
        assert roomy.info.model_fingerprint == alone.info.model_fingerprint
        assert await answers(roomy) == expected
        assert await answers(roomy) == expected
        assert (await roomy.call("stats"))["prefix_cache_stats"]["hits"] > 0
        await roomy.call("check_integrity")
    async with started(InProcessClient, model, kv_cache_bytes=8 * block_bytes, **CRAMPED) as cramped:
        assert await answers(cramped) == expected
        assert (await cramped.call("counters"))["num_preemptions_total"] > 0
        await cramped.call("check_integrity")


async def test_two_ranks_answer_as_one(tmp_path: Path) -> None:
    """D1, A5, A14, A32: greedy and seeded; chunks, cached prefixes and preemption change nothing."""
    await assert_two_ranks_answer_as_one(make_checkpoint(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
async def test_two_ranks_of_other_families(tmp_path: Path, family: str) -> None:
    await assert_two_ranks_answer_as_one(make_checkpoint(tmp_path, family))


@pytest.mark.slow
async def test_two_ranks_of_the_demo_model(demo_model: Path) -> None:
    await assert_two_ranks_answer_as_one(demo_model)


def ranks_of(engine_pid: int) -> list[psutil.Process]:
    return psutil.Process(engine_pid).children()


async def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=60)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


async def test_a_rank_killed_at_work_ends_the_engine_clearly(tmp_path: Path) -> None:
    """The running request ends with an error that names the rank; no request waits; no process stays."""
    async with started(ProcessClient, make_checkpoint(tmp_path)) as client:
        ranks = ranks_of(await client.call("pid"))
        assert len(ranks) == 2
        sampling = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        stream = client.generate(EngineRequest(request_id="r", prompt_token_ids=[1], sampling=sampling))
        assert (await anext(stream)).token_ids
        ranks[0].send_signal(signal.SIGKILL)
        outputs = [output async for output in stream]
        assert outputs[-1].error_kind == "worker_lost", "so that it is replayed elsewhere"
        assert (
            "rank 0 of 2" in outputs[-1].error_message and "killed by signal 9" in outputs[-1].error_message
        )
        await asyncio.wait_for(client.died.wait(), 60)
        await assert_gone(ranks)


@pytest.mark.slow
async def test_a_rank_killed_in_an_idle_engine_ends_it_at_once(tmp_path: Path) -> None:
    """Not at the next request, which would be lost to it."""
    async with started(ProcessClient, make_checkpoint(tmp_path)) as client:
        ranks = ranks_of(await client.call("pid"))
        ranks[1].send_signal(signal.SIGKILL)
        await asyncio.wait_for(client.died.wait(), 60)
        await assert_gone(ranks)


@pytest.mark.slow
async def test_ranks_die_with_their_engine(tmp_path: Path) -> None:
    async with started(ProcessClient, make_checkpoint(tmp_path)) as client:
        engine = await client.call("pid")
        ranks = ranks_of(engine)
        os.kill(engine, signal.SIGKILL)
        await asyncio.wait_for(client.died.wait(), 60)
        await assert_gone(ranks)
