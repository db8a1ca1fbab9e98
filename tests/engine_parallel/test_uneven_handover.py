"""Hand-overs to and from ranks that hold copies of KV heads: one copy is read, and the tokens are those of one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from contract.identity import Role
from engine.client import ProcessClient
from engine.connecting import Transfers
from engine.settings import EngineSettings
from roles.table import STAGES
from tests.checkpoints import make_checkpoint
from tests.engine_pair import EnginePair, transfer_factory
from tests.engine_parallel.test_ranks_handover import alone, assert_equals_one_rank, pair_of, settings

MODELS: dict[str, dict[str, Any]] = {
    "two KV heads": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 267},
    "one KV head": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8},
    "three KV heads": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "head_dim": 8},
}


@pytest.fixture(scope="module", params=MODELS)
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", seed=3, **MODELS[request.param])


@pytest.mark.parametrize(
    ("prefill", "decode", "transport"),
    [
        (4, 1, "shm"),
        (1, 4, "tcp"),
        (2, 4, "shm"),
        (4, 4, "tcp"),
        pytest.param(4, 1, "tcp", marks=pytest.mark.slow),
        pytest.param(1, 4, "shm", marks=pytest.mark.slow),
        pytest.param(4, 2, "tcp", marks=pytest.mark.slow),
        pytest.param(2, 3, "tcp", marks=pytest.mark.slow),
        pytest.param(3, 2, "shm", marks=pytest.mark.slow),
    ],
)
async def test_the_tokens_are_those_of_one_rank(
    model: Path, prefill: int, decode: int, transport: str
) -> None:
    expected = await alone(model)
    async with pair_of(settings(model, prefill), settings(model, decode), transport) as pair:
        counters = await assert_equals_one_rank(pair, expected)
        assert counters[f"transfer_blocks_total{{transport={transport}}}"] > 0


@pytest.mark.parametrize("num_ranks", [2, 4])
async def test_one_rank_reads_each_head_once(tmp_path: Path, num_ranks: int) -> None:
    """A reader of four ranks with two heads twice reads as many bytes as one of two ranks with each once."""
    folder = make_checkpoint(tmp_path, "llama", seed=3, **MODELS["two KV heads"])
    expected = await alone(folder)

    def unshared(size: int) -> EngineSettings:
        return settings(folder, size, enable_prefix_caching=False)

    async with pair_of(unshared(num_ranks), unshared(1), "tcp") as pair:
        counters = await assert_equals_one_rank(pair, expected)
        num_blocks = counters["transfer_needed_blocks_total"]
        block_bytes = pair.decode.info.layout.block_bytes
        assert counters["transfer_bytes_total{transport=tcp}"] == num_blocks * block_bytes
        assert pair.prefill.info.side.whole == pair.decode.info.layout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("prefill", "decode", "transport"), [(4, 1, "shm"), (2, 4, "tcp")])
async def test_rank_processes_hand_over_the_tokens_of_one_rank(
    tmp_path: Path, prefill: int, decode: int, transport: str
) -> None:
    """The ranks are processes, whose sums are gloo's."""
    folder = make_checkpoint(tmp_path, "llama", seed=3, **MODELS["two KV heads"])
    expected = await alone(folder)
    factories = [transfer_factory(role, None, transport) for role in (Role.PREFILL, Role.DECODE)]
    sender = await ProcessClient.start(settings(folder, prefill), Transfers(factories[0], STAGES))
    try:
        receiver = await ProcessClient.start(settings(folder, decode), Transfers(factories[1], STAGES))
        try:
            await assert_equals_one_rank(EnginePair(sender, receiver), expected)
        finally:
            await receiver.shutdown()
    finally:
        await sender.shutdown()
