"""Hand-overs between engines with different numbers of ranks: in float32 the tokens are those of one rank.

Ranks are threads here; ``tests/e2e/test_unequal_workers.py`` uses real processes.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from contract.identity import Role
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.client import InProcessClient
from engine.compute import runner
from engine.connecting import Transfers
from engine.executor import Executor, create_executor
from engine.kv_cache.shares import Workload
from engine.kv_cache.startup import initialize_kv_cache
from engine.settings import EngineSettings
from roles.table import STAGES
from tests.checkpoints import make_checkpoint
from tests.engine_pair import EnginePair, outputs_of, tokens_of, transfer_factory
from tests.fakes.engine.graphs import FakeDeviceGraphs
from tests.fakes.engine.local_ranks import LocalRanksExecutor

_RNG = random.Random(9)
SHARED = [_RNG.randrange(5, 250) for _ in range(64)]
PROMPTS = [
    *([_RNG.randrange(5, 250) for _ in range(count)] for count in (1, 15, 16, 17, 33, 150)),
    *([*SHARED, *(_RNG.randrange(5, 250) for _ in range(count))] for count in (1, 40)),
]
"""Lengths at and around the ends of blocks, one of several chunks, and two with common full blocks."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
Requests = Sequence[tuple[list[int], SamplingParams]]
REQUESTS = [(prompt, sampling) for prompt in PROMPTS for sampling in (GREEDY, SAMPLED)]
LONG = [(prompt, replace(GREEDY, max_tokens=60)) for prompt in PROMPTS[:5]]
CHUNK = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", seed=3)


def settings(model: Path, num_ranks: int, **changes: Any) -> EngineSettings:
    defaults = {"dtype": "float32", "kv_cache_bytes": 2**23, "max_num_batched_tokens": CHUNK}
    return EngineSettings(model=model, tensor_parallel_size=num_ranks, **{**defaults, **changes})


def start_with_threads(settings: EngineSettings) -> tuple[Executor, int]:
    """Start an executor; several ranks are threads of this process."""
    several = settings.tensor_parallel_size > 1
    executor: Executor = LocalRanksExecutor(settings) if several else create_executor(settings)
    return executor, initialize_kv_cache(executor)[0]


def start_with_windows(settings: EngineSettings) -> tuple[Executor, int]:
    """Start an executor whose layers keep what their windows reach."""
    several = settings.tensor_parallel_size > 1
    executor: Executor = LocalRanksExecutor(settings) if several else create_executor(settings)
    length = executor.model_info.max_model_len
    workload = Workload(length, settings.max_num_batched_tokens, settings.max_num_seqs)
    return executor, initialize_kv_cache(executor, workload=workload)[0]


@asynccontextmanager
async def pair_of(
    prefill: EngineSettings,
    decode: EngineSettings,
    transport: str,
    start: Callable[[EngineSettings], tuple[Executor, int]] = start_with_threads,
) -> AsyncIterator[EnginePair]:
    """Run two engines, joined by real connectors."""
    factories = [transfer_factory(role, None, transport) for role in (Role.PREFILL, Role.DECODE)]
    sender = await InProcessClient.start(prefill, Transfers(factories[0], STAGES), start=start)
    try:
        receiver = await InProcessClient.start(decode, Transfers(factories[1], STAGES), start=start)
        try:
            yield EnginePair(sender, receiver)
        finally:
            await receiver.shutdown()
    finally:
        await sender.shutdown()


async def alone(model: Path, asked: Requests = REQUESTS) -> list[list[int]]:
    """Return the answers of one engine with one rank."""
    client = await InProcessClient.start(settings(model, 1))
    try:
        requests = [
            EngineRequest(request_id=f"r{index}", prompt_token_ids=prompt, sampling=sampling)
            for index, (prompt, sampling) in enumerate(asked)
        ]
        return [
            tokens_of(outputs) for outputs in await asyncio.gather(*(outputs_of(client, r) for r in requests))
        ]
    finally:
        await client.shutdown()


async def assert_equals_one_rank(
    pair: EnginePair, expected: list[list[int]], asked: Requests = REQUESTS
) -> dict[str, float]:
    """Assert that all requests at once give the same tokens and that nothing is held afterwards; return decode counters."""
    answers = await asyncio.gather(*(pair.ask(f"r{index}", *each) for index, each in enumerate(asked)))
    assert [tokens_of(*legs) for legs in answers] == expected
    await pair.until_free()
    counters: dict[str, float] = await pair.decode.call("counters")
    assert counters["transfer_needed_blocks_total"] > 0
    assert counters["transfers_quarantined"] == 0
    return counters


@pytest.mark.parametrize(
    ("prefill", "decode", "transport", "block_size"),
    [
        (2, 1, "auto", 32),
        (1, 2, "tcp", 16),
        (2, 2, "auto", 16),
        pytest.param(2, 2, "shm", 8, marks=pytest.mark.slow),
        pytest.param(2, 1, "tcp", 16, marks=pytest.mark.slow),
        pytest.param(1, 2, "shm", 32, marks=pytest.mark.slow),
    ],
)
async def test_the_tokens_are_those_of_one_rank(
    model: Path, prefill: int, decode: int, transport: str, block_size: int
) -> None:
    """Heads are combined, selected, or read unchanged. block_size: of the prefill engine; the decode engine has 16."""
    expected = await alone(model)
    sender = settings(model, prefill, block_size=block_size)
    async with pair_of(sender, settings(model, decode), transport) as pair:
        counters = await assert_equals_one_rank(pair, expected)
        is_direct = (prefill, block_size) == (decode, 16)
        assert (counters.get("transfer_converted_blocks_total", 0) == 0) == is_direct
        used = "tcp" if transport == "tcp" else "shm"
        assert counters[f"transfer_blocks_total{{transport={used}}}"] > 0


@pytest.mark.parametrize(("prefill", "decode", "transport"), [(2, 2, "tcp"), (1, 2, "shm")])
async def test_ranks_that_run_ahead_hand_over_the_tokens_of_one(
    model: Path, prefill: int, decode: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await alone(model)
    monkeypatch.setattr(runner, "forward_pass", FakeDeviceGraphs)
    async with pair_of(settings(model, prefill), settings(model, decode), transport) as pair:
        await assert_equals_one_rank(pair, expected)


async def test_received_kv_comes_back_from_the_tiers_of_all_ranks(model: Path) -> None:
    """A17: a decode worker of two ranks that preempts; its answers resume with blocks that came from its peer."""
    expected = await alone(model, LONG)
    block_bytes = (
        2 * 2 * 2 * 16 * 4 * 16
    )  # K and V of 2 layers with 2 heads of 16 numbers of 4 bytes, for 16 tokens
    cramped = settings(
        model, 2, kv_cache_bytes=14 * block_bytes, host_kv_bytes=99 * block_bytes, max_model_len=192
    )
    async with pair_of(settings(model, 2), cramped, "tcp") as pair:
        assert pair.decode.info.num_blocks == 14
        counters = await assert_equals_one_rank(pair, expected, LONG)
        assert counters["num_preemptions_total"] > 0
        assert counters["kv_tier_loaded_blocks_total{tier=host}"] > 0
        assert counters["kv_tier_failed_blocks_total{tier=host}"] == 0


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
async def test_ranks_hand_over_what_windows_reach(tmp_path: Path, num_prefill: int, num_decode: int) -> None:
    """Each rank has both groups of layers, and reads its heads of both."""
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    folder = make_checkpoint(tmp_path, "qwen2", seed=3, **windows)
    asked = [(prompt, GREEDY) for prompt in PROMPTS]
    prefill, decode = (settings(folder, number) for number in (num_prefill, num_decode))
    async with pair_of(prefill, decode, "tcp", start_with_windows) as pair:
        assert [group.window for group in pair.decode.info.groups] == [None, 20]
        counters = await assert_equals_one_rank(pair, await alone(folder, asked), asked)
    assert (counters["transfer_converted_blocks_total"] > 0) is (num_prefill != num_decode)
