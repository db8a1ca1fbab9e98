"""The deciding half on the real computing half: both clients, with and without chunks, caching and preemption."""

import asyncio
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.client import InProcessClient, ProcessClient
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint

NUM_TOKENS = 12
SHARED = [(7 * n) % 250 for n in range(40)]
BATCHING: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 16},
    # A preempted answer may be longer than a step, which no prompt is.
    {"max_num_batched_tokens": 42, "scheduling_policy": "prefill-first"},
]
PROMPTS = [[3], SHARED[:16], SHARED, [*SHARED, 9, 9], [*SHARED[:20], 1, 2, 3], [200, 100] * 15]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


async def answers(client: Any) -> list[list[int]]:
    """Return the answers to each prompt: every other one is drawn with a seed, the rest are greedy."""

    async def one(index: int, prompt: list[int]) -> list[int]:
        sampling = SamplingParams(temperature=float(index % 2), seed=index, max_tokens=NUM_TOKENS)
        request = EngineRequest(request_id=f"r{index}", prompt_token_ids=prompt, sampling=sampling)
        return [token async for output in client.generate(request) for token in output.token_ids]

    try:
        return await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(PROMPTS)))
    finally:
        await client.call("check_integrity")


async def test_both_clients_give_the_same_tokens(model: Path) -> None:
    """A5, A32, A14, A25: a roomy engine in a process; cramped ones in a thread, of each policy, which preempt."""
    roomy = await ProcessClient.start(EngineSettings(model=model, kv_cache_bytes=2**22))
    try:
        expected = await answers(roomy)
    finally:
        await roomy.shutdown()
    assert [len(tokens) for tokens in expected] == [NUM_TOKENS] * len(PROMPTS)
    block_bytes = roomy.info.layout.block_bytes
    for batching in BATCHING:
        cramped = await InProcessClient.start(
            EngineSettings(
                model=model, kv_cache_bytes=8 * block_bytes, max_model_len=80, max_num_seqs=4, **batching
            )
        )
        try:
            assert await answers(cramped) == expected
            counted = await cramped.call("counters")
            assert counted["num_preemptions_total"] > 0
        finally:
            await cramped.shutdown()


async def roomy_answers(model: Path) -> tuple[list[list[int]], int]:
    """Return the answers of an engine that never runs short, and the bytes of a block."""
    roomy = await InProcessClient.start(EngineSettings(model=model, kv_cache_bytes=2**22))
    try:
        return await answers(roomy), roomy.info.layout.block_bytes
    finally:
        await roomy.shutdown()


@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("kind", ["host", "disk"])
async def test_a_cramped_engine_with_a_tier_gives_the_same_tokens_and_loads_blocks(
    model: Path, tmp_path: Path, batching: dict[str, Any], kind: str
) -> None:
    """A17: preempted requests, and prompts whose prefix was evicted, get real blocks back from host memory or a disk."""
    expected, block_bytes = await roomy_answers(model)
    tier: dict[str, Any] = {"host_kv_bytes": 64 * block_bytes}
    if kind == "disk":
        tier = {"disk_kv_dir": tmp_path / "kv", "disk_kv_bytes": 70 * block_bytes}
    cramped = await InProcessClient.start(
        EngineSettings(
            model=model,
            kv_cache_bytes=6 * block_bytes,
            max_model_len=80,
            max_num_seqs=4,
            **tier,
            **batching,
        )
    )
    try:
        for _ in range(3):
            assert await answers(cramped) == expected
        counted = await cramped.call("counters")
        assert counted[f"kv_tier_loaded_blocks_total{{tier={kind}}}"] > 0
        assert counted[f"kv_tier_failed_blocks_total{{tier={kind}}}"] == 0
        num_stored = counted[f"kv_tier_stored_blocks_total{{tier={kind}}}"]
        assert counted[f"kv_tier_bytes{{tier={kind}}}"] == block_bytes * num_stored
    finally:
        await cramped.shutdown()


async def test_a_restart_with_the_same_folder_keeps_the_hit_rate_and_damage_changes_no_token(
    model: Path, tmp_path: Path
) -> None:
    """A17: 90 % of the hits of the engine before; with flipped bits in the files fewer, and the same tokens."""
    expected, block_bytes = await roomy_answers(model)
    settings = EngineSettings(
        model=model,
        kv_cache_bytes=12 * block_bytes,
        disk_kv_dir=tmp_path,
        disk_kv_bytes=70 * block_bytes,
        max_model_len=80,
        max_num_seqs=4,
    )

    async def num_hits(num_rounds: int) -> list[int]:
        """Start an engine, and return the tokens of each round that a cache had."""
        client = await InProcessClient.start(settings)
        try:
            hits = [0]
            for _ in range(num_rounds):
                assert await answers(client) == expected
                hits.append((await client.call("counters"))["prefix_cache_hits_total"])
        finally:
            await client.shutdown()
        return [after - before for before, after in pairwise(hits)]

    before = (await num_hits(3))[-1]
    (after,) = await num_hits(1)
    assert before > 0 and after >= 0.9 * before
    drawn = random.Random(8)
    for file in tmp_path.glob("*.slab"):
        content = bytearray(file.read_bytes())
        for _ in range(200):
            bit = drawn.randrange(
                8 * 4096, 8 * len(content)
            )  # not in the header, for which the file would be ignored
            content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
    (damaged,) = await num_hits(1)
    assert damaged < after
