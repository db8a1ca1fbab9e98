"""Experts spread over the ranks of a group: the tokens are those of one engine that has them all."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import SettingError
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from data_parallel.gate import join_group
from data_parallel.options import GroupPlan
from engine.client import ProcessClient
from engine.settings import EngineSettings
from tests.checkpoints import load_reference, make_foreign_checkpoint, reference_greedy, write_checkpoint
from tests.data_parallel.group import SECRET, free_port
from tests.families.tiny_models import make_tiny

NUM_TOKENS = 12
PROMPTS = [[7], [3, 1, 4, 1, 5], [(37 * i + 11) % 256 for i in range(24)], list(range(60, 81)), [200, 201]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@asynccontextmanager
async def running_engines(
    folder: Path,
    size: int,
    tensor_parallel_size: int = 1,
    hosts: Sequence[str] = (),
    **changes: Any,
) -> AsyncIterator[list[ProcessClient]]:
    """Run a group of engines in processes of their own. hosts: the address of each; none: 127.0.0.1."""
    small = {"block_size": 4, "max_num_batched_tokens": 13, "kv_cache_bytes": 2**20, "host_kv_bytes": 2**20}
    settings = EngineSettings(
        **{**small, **changes},
        model=folder,
        dtype="float32",
        data_parallel_size=size,
        tensor_parallel_size=tensor_parallel_size,
    )
    hosts = hosts or ("127.0.0.1",) * size
    address = f"{hosts[0]}:{free_port()}"
    plans = [
        GroupPlan(
            dp_rank=rank,
            dp_size=size,
            address=address,
            listen_host=host,
            host=host,
            secret=SECRET,
            shares_memory=len(set(hosts)) == 1,
        )
        for rank, host in enumerate(hosts)
    ]
    async with AsyncExitStack() as stack:
        starts = [ProcessClient.start(settings, gate=partial(join_group, plan)) for plan in plans]
        engines = await asyncio.gather(*starts)
        stack.push_async_callback(
            asyncio.gather, *(engine.shutdown() for engine in engines), return_exceptions=True
        )
        yield engines


async def answer(engine: ProcessClient, name: str, prompt: list[int]) -> list[int]:
    request = EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=GREEDY)
    return [token async for output in engine.generate(request) for token in output.token_ids]


@pytest.mark.parametrize(
    ("size", "tensor_parallel_size"),
    [(2, 1), pytest.param(4, 1, marks=pytest.mark.slow), pytest.param(2, 2, marks=pytest.mark.slow)],
)
async def test_the_answers_are_those_of_one_engine(
    tmp_path: Path, size: int, tensor_parallel_size: int
) -> None:
    """A17, B16: each engine has KV tiers of its own; none reads its part of the weights again without the others."""
    folder = make_foreign_checkpoint(tmp_path, "qwen3_moe", seed=3)
    model = load_reference(folder)
    expected = [reference_greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    async with running_engines(folder, size, tensor_parallel_size) as engines:
        alone = [await answer(engines[size - 1], f"a{index}", prompt) for index, prompt in enumerate(PROMPTS)]
        assert alone == expected
        together = await asyncio.gather(
            *(answer(engines[index % size], f"b{index}", prompt) for index, prompt in enumerate(PROMPTS))
        )
        assert list(together) == expected
        for engine in engines:
            with pytest.raises(
                SettingError, match=f"over the {size} engines of a data-parallel group, .* alone"
            ):
                await engine.reload_weights()
        assert await answer(engines[0], "c", PROMPTS[2]) == expected[2]
        for engine in engines:
            assert await engine.call("reset_prefix_cache")  # it waits for what the tier copies
            assert (await engine.call("counters"))["kv_tier_stored_blocks_total{tier=host}"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("qwen3_5_moe_text", "chunked-prefill"),
        ("qwen3_5_moe_text", "prefill-first"),
        ("gpt_oss", "prefill-first"),
        ("deepseek_v3", "chunked-prefill"),
    ],
)
async def test_ranks_have_states_windows_and_latents_of_their_own_requests(
    tmp_path: Path, family: str, policy: str
) -> None:
    """Experts of models that transformers computes; room runs short, and each rank makes empty passes."""
    torch.manual_seed(3)
    folder = write_checkpoint(tmp_path, make_tiny(family), 3)
    model = load_reference(folder)
    expected = [reference_greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    settings: dict[str, Any] = {
        "host_kv_bytes": 0,
        "scheduling_policy": policy,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 2,
    }
    async with running_engines(folder, 2, **settings) as engines:
        for index, prompt in enumerate(PROMPTS):
            assert await answer(engines[index % 2], f"a{index}", prompt) == expected[index]
        together = await asyncio.gather(
            *(answer(engines[index % 2], f"b{index}", PROMPTS[index % 5]) for index in range(10))
        )
        assert list(together) == 2 * expected


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only there all of 127.0.0.0/8 is this machine")
async def test_ranks_are_on_several_hosts(tmp_path: Path) -> None:
    """E18: each listens on its own address only, and all reach rank 0 at its address."""
    folder = make_foreign_checkpoint(tmp_path, "qwen3_moe", seed=3)
    expected = reference_greedy(load_reference(folder), PROMPTS[1], NUM_TOKENS)
    async with running_engines(folder, 2, hosts=("127.0.0.2", "127.0.0.3")) as engines:
        for engine in engines:
            assert await answer(engine, "a", PROMPTS[1]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 2])
async def test_a_group_without_one_of_its_processes_is_down_soon(
    tmp_path: Path, victim: int, number: signal.Signals
) -> None:
    """E19: with any rank killed or stopped, every other process has ended within three seconds."""
    folder = make_foreign_checkpoint(tmp_path, "qwen3_moe", seed=3)
    async with running_engines(folder, 3) as engines:
        asking = asyncio.create_task(answer(engines[1], "a", [1, 2, 3]))
        pids = [await engine.call("pid") for engine in engines]
        os.kill(pids[victim], number)
        try:
            async with asyncio.timeout(10):
                for index, engine in enumerate(engines):
                    if index != victim:
                        await engine.died.wait()
        finally:
            if number is signal.SIGSTOP:
                os.kill(pids[victim], signal.SIGKILL)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
