"""Real engines hand over by ``nixl`` and ``nccl`` (gloo): equal tokens, straight into the pool and by way of staging."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.client import InProcessClient
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from tests.engine_pair import Sides, outputs_of, running_pair, tokens_of

PROMPT = [random.Random(5).randrange(5, 250) for _ in range(150)]
SAMPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("transport", ["nixl", "nccl"])
@pytest.mark.parametrize("decode", [{}, {"block_size": 32}], ids=["same", "wider"])
async def test_tokens_are_those_of_one_engine(tmp_path: Path, transport: str, decode: dict[str, Any]) -> None:
    """A prompt in chunks of 32 tokens; the sender's blocks cross, whatever the size of the receiver's."""
    torch.set_num_threads(1)
    make_checkpoint(tmp_path, "llama", seed=3)
    alone = await InProcessClient.start(EngineSettings(model=tmp_path, kv_cache_bytes=16 * 2**20))
    request = EngineRequest(request_id="alone", prompt_token_ids=PROMPT, sampling=SAMPLED)
    expected = tokens_of(await outputs_of(alone, request))
    await alone.shutdown()
    sides = Sides(decode=decode, transport=transport)
    async with running_pair(tmp_path, sides=sides, max_num_batched_tokens=32) as pair:
        first, rest = await pair.ask("chunked", PROMPT, SAMPLED)
        counters = await pair.decode.call("counters")
        await pair.until_free()
    assert tokens_of(first, rest) == expected
    assert counters[f"transfer_blocks_total{{transport={transport}}}"] == -(-len(PROMPT) // 16)
