"""`make gpu-check`: on CUDA in float32, one engine and a hand-over give the CPU engine's tokens."""

import random
from pathlib import Path

import pytest

from contract.requests import EngineRequest, SamplingParams
from engine.client import InProcessClient
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from tests.engine_pair import outputs_of, running_pair, tokens_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

POOL_BYTES = 32 * 2**20


def requests() -> list[EngineRequest]:
    rng = random.Random(17)
    return [
        EngineRequest(
            request_id=f"gpu-{index}",
            prompt_token_ids=[rng.randrange(5, 250) for _ in range(length)],
            sampling=SamplingParams(temperature=float(index % 2), seed=index, max_tokens=16, ignore_eos=True),
        )
        for index, length in enumerate((1, 15, 16, 17, 100, 333))
    ]


async def one_engine(model: Path, device: str) -> list[list[int]]:
    settings = EngineSettings(model=model, device=device, dtype="float32", kv_cache_bytes=POOL_BYTES)
    client = await InProcessClient.start(settings)
    try:
        return [tokens_of(await outputs_of(client, request)) for request in requests()]
    finally:
        await client.shutdown()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
async def test_cuda_equals_cpu(tmp_path: Path, family: str) -> None:
    """One engine, each family: the same tokens on both devices, and through the hand-over between two CUDA engines."""
    make_checkpoint(tmp_path, family, seed=4)
    expected = await one_engine(tmp_path, "cpu")
    assert await one_engine(tmp_path, "cuda") == expected
    async with running_pair(
        tmp_path, device="cuda", kv_cache_bytes=POOL_BYTES, max_num_batched_tokens=64
    ) as pair:
        for request, tokens in zip(requests(), expected, strict=True):
            first, rest = await pair.ask(request.request_id, request.prompt_token_ids, request.sampling)
            assert tokens_of(first, rest) == tokens
