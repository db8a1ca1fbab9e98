"""Whole engines over two rank processes: both clients, chunks, prefix cache, preemption, and killed processes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from contract.requests import EngineRequest
from contract.sampling import Grammar, SamplingParams
from engine.client import EngineClient, InProcessClient, ProcessClient
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.timeout(300)
"""Each of several processes loads torch, perhaps while other tests run."""

NUM_TOKENS = 10
SHARED = [(7 * n) % 250 for n in range(40)]
PROMPTS = [[3], SHARED[:16], SHARED, [*SHARED, 9, 9], [*SHARED[:20], 1, 2, 3], [200, 100] * 15]
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS),
    SamplingParams(temperature=1.5, top_p=0.95, seed=11, max_tokens=NUM_TOKENS),
    SamplingParams(seed=5, max_tokens=NUM_TOKENS, grammar=Grammar("regex", "[a-z]{4}(-[0-9]+)*")),
]
SMALL = {"max_num_batched_tokens": 16, "max_model_len": 80, "max_num_seqs": 4}


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

    cases = [(prompt, sampling) for sampling in SAMPLINGS for prompt in PROMPTS]
    return await asyncio.gather(*(one(index, *each) for index, each in enumerate(cases)))


async def assert_two_ranks_give_the_answers_of_one(model: Path) -> None:
    """Compare with one rank: a large engine with rank processes, twice, and a small engine in a thread."""
    async with started(InProcessClient, model, tensor_parallel_size=1) as alone:
        expected = await answers(alone)
        block_bytes = alone.info.layout.block_bytes
    assert len(set(map(tuple, expected))) > len(PROMPTS)
    async with started(ProcessClient, model) as large:
        assert large.info.layout.num_kv_heads * 2 == alone.info.layout.num_kv_heads
        assert large.info.num_blocks == alone.info.num_blocks
        assert large.info.model_fingerprint == alone.info.model_fingerprint
        assert await answers(large) == expected
        assert await answers(large) == expected
        assert (await large.call("stats"))["prefix_cache_stats"]["hits"] > 0
        await large.call("check_integrity")
    async with started(InProcessClient, model, kv_cache_bytes=8 * block_bytes, **SMALL) as small:
        assert await answers(small) == expected
        assert (await small.call("counters"))["num_preemptions_total"] > 0
        await small.call("check_integrity")


@pytest.mark.slow
async def test_two_ranks_give_the_answers_of_one(tmp_path: Path) -> None:
    """D1, A5, A14, A32: greedy and seeded; chunks, cached prefixes and preemption change nothing."""
    await assert_two_ranks_give_the_answers_of_one(make_checkpoint(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
async def test_two_ranks_of_other_families(tmp_path: Path, family: str) -> None:
    await assert_two_ranks_give_the_answers_of_one(make_checkpoint(tmp_path, family))


@pytest.mark.slow
async def test_two_ranks_of_the_demo_model(demo_model: Path) -> None:
    await assert_two_ranks_give_the_answers_of_one(demo_model)


def ranks_of(engine_pid: int) -> list[psutil.Process]:
    return psutil.Process(engine_pid).children()


async def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=60)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


async def test_a_rank_that_is_killed_at_work_ends_the_engine_with_a_clear_error(tmp_path: Path) -> None:
    """The running request ends with an error that names the rank; no request is left waiting and no process is left."""
    async with started(ProcessClient, make_checkpoint(tmp_path)) as client:
        ranks = ranks_of(await client.call("pid"))
        assert len(ranks) == 2
        sampling = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        stream = client.generate(EngineRequest(request_id="r", prompt_token_ids=[1], sampling=sampling))
        assert (await anext(stream)).token_ids
        ranks[0].send_signal(signal.SIGKILL)
        outputs = [output async for output in stream]
        assert outputs[-1].error_kind == "worker_lost", "the router replays only this kind elsewhere"
        assert (
            "rank 0 of 2" in outputs[-1].error_message and "killed by signal 9" in outputs[-1].error_message
        )
        await asyncio.wait_for(client.died.wait(), 60)
        await assert_gone(ranks)


@pytest.mark.slow
async def test_a_rank_that_is_killed_in_an_idle_engine_ends_it_at_once(tmp_path: Path) -> None:
    """The engine does not wait for the next request, which would be lost."""
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
