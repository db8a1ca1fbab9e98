"""`make gpu-check`: on CUDA in float32, one engine and a hand-over give the tokens of an engine on the CPU."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_steps import usable_backends
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
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


async def one_engine(model: Path, device: str, **settings: Any) -> list[list[int]]:
    """Run all requests at once, so that steps are batches."""
    fields = {"dtype": "float32", "kv_cache_bytes": POOL_BYTES, "max_num_seqs": 8, **settings}
    client = await InProcessClient.start(EngineSettings(model=model, device=device, **fields))
    try:
        outputs = await asyncio.gather(*(outputs_of(client, request) for request in requests()))
        return [tokens_of(own) for own in outputs]
    finally:
        await client.shutdown()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
async def test_cuda_equals_cpu(tmp_path: Path, family: str) -> None:
    """Each family, with and without graphs: the CPU's tokens, also through the hand-over between two CUDA engines."""
    make_checkpoint(tmp_path, family, seed=4)
    expected = await one_engine(tmp_path, "cpu")
    for is_eager in (True, False):
        for backend in ("torch", "triton"):
            settings = {"attention_backend": backend, "enforce_eager": is_eager}
            assert await one_engine(tmp_path, "cuda", **settings) == expected, settings
    async with running_pair(
        tmp_path, device="cuda", kv_cache_bytes=POOL_BYTES, max_num_batched_tokens=64, max_num_seqs=8
    ) as pair:
        for request, tokens in zip(requests(), expected, strict=True):
            first, rest = await pair.ask(request.request_id, request.prompt_token_ids, request.sampling)
            assert tokens_of(first, rest) == tokens


async def test_bfloat16_graphs_give_the_tokens_of_eager_steps(tmp_path: Path) -> None:
    """Rounding may choose another token between near ones, and all later tokens then differ: more than half are equal."""
    make_checkpoint(tmp_path, "llama", seed=4, head_dim=128)
    for backend in usable_backends(torch.device("cuda", 0), 128):
        settings = {"dtype": "bfloat16", "attention_backend": backend}
        eager = await one_engine(tmp_path, "cuda", enforce_eager=True, **settings)
        graphed = await one_engine(tmp_path, "cuda", **settings)
        pairs = [
            pair for one, other in zip(eager, graphed, strict=True) for pair in zip(one, other, strict=True)
        ]
        assert sum(one == other for one, other in pairs) > len(pairs) / 2, backend
