"""Real engines hand over by ``nixl`` and ``nccl`` (gloo): equal tokens, straight into the pool and by way of staging."""

import random
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from contract.layout import KVLayout
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.client import InProcessClient
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from tests.engine_pair import Sides, outputs_of, running_pair, tokens_of
from tests.kv_transfer.device_memory import FakeDevice

PROMPT = [random.Random(5).randrange(5, 250) for _ in range(150)]
SAMPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)


async def tokens_alone(model: Path) -> list[int]:
    alone = await InProcessClient.start(EngineSettings(model=model, kv_cache_bytes=16 * 2**20))
    request = EngineRequest(request_id="alone", prompt_token_ids=PROMPT, sampling=SAMPLED)
    expected = tokens_of(await outputs_of(alone, request))
    await alone.shutdown()
    return expected


@pytest.mark.parametrize("transport", ["nixl", "nccl"])
@pytest.mark.parametrize("decode", [{}, {"block_size": 32}], ids=["same", "wider"])
async def test_tokens_are_those_of_one_engine(tmp_path: Path, transport: str, decode: dict[str, Any]) -> None:
    """A prompt in chunks of 32 tokens; the sender's blocks cross, whatever the size of the receiver's."""
    torch.set_num_threads(1)
    make_checkpoint(tmp_path, "llama", seed=3)
    expected = await tokens_alone(tmp_path)
    sides = Sides(decode=decode, transport=transport)
    async with running_pair(tmp_path, sides=sides, max_num_batched_tokens=32) as pair:
        first, rest = await pair.ask("chunked", PROMPT, SAMPLED)
        counters = await pair.decode.call("counters")
        await pair.until_free()
    assert tokens_of(first, rest) == expected
    assert counters[f"transfer_blocks_total{{transport={transport}}}"] == -(-len(PROMPT) // 16)


class FarMemory(FakeDevice):
    """The pool of an engine. made: all of this test."""

    made: ClassVar[list["FarMemory"]] = []

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        super().__init__(layout, num_blocks, device)
        self.pool.fill_(torch.nan)  # the bytes of nothing
        self.pool[0] = 0
        FarMemory.made.append(self)


@pytest.mark.parametrize("transport", ["nixl", "tcp", "nccl"])
@pytest.mark.parametrize("decode", [{}, {"block_size": 32}], ids=["same", "wider"])
@pytest.mark.parametrize("chunk", [32, 256], ids=["chunks", "layers"])
async def test_pools_on_devices_are_written_without_staging_where_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, decode: dict[str, Any], chunk: int
) -> None:
    """NIXL writes equal blocks straight into the receiver's pool, others into an area beside it where they are converted.

    Groups of two receive on the device, too. No byte passes through a host then. Both sides digest blocks where they lie.
    """
    torch.set_num_threads(1)
    make_checkpoint(tmp_path, "llama", seed=3, num_hidden_layers=4)
    expected = await tokens_alone(tmp_path)
    monkeypatch.setattr("engine.kv_cache.regions.allocate", FarMemory)
    monkeypatch.setattr(FarMemory, "made", [])
    sides = Sides(decode=decode, transport=transport)
    async with running_pair(tmp_path, sides=sides, max_num_batched_tokens=chunk) as pair:
        first, rest = await pair.ask("once", PROMPT, SAMPLED)
        counters = await pair.decode.call("counters")
        await pair.until_free()
    assert tokens_of(first, rest) == expected
    assert counters[f"transfer_blocks_total{{transport={transport}}}"] == -(-len(PROMPT) // 16)
    prefilled, decoded = FarMemory.made
    is_direct = transport != "tcp"
    assert (prefilled.num_through_host + decoded.num_through_host == 0) == is_direct
    assert prefilled.num_folded > 0
    places = decoded.areas if decode else [decoded]
    assert [each.num_folded > 0 for each in places] == [is_direct]
