"""`make gpu-check`: one engine on CUDA and a hand-over between two give the tokens of an engine on the CPU."""

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_steps import usable_backends
from tests.gpu.golden_cases import (
    assert_same_tokens,
    make_model,
    share_of_equal,
    tokens_of_engine,
    tokens_of_pair,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CUDA = torch.device("cuda", 0)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
TRANSPORTS = ("tcp", *(["nixl"] if find_spec("nixl_cu13") else []))


@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_equals_cpu_in_float32(tmp_path: Path, family: str) -> None:
    """Batches of each family, with and without graphs, and with and without steps that run ahead."""
    make_model(tmp_path, family)
    expected = asyncio.run(tokens_of_engine(tmp_path, device="cpu"))
    for backend in ("torch", "triton"):
        for is_eager, runs_ahead in ((True, True), (False, True), (False, False)):
            settings: dict[str, Any] = {"attention_backend": backend, "enforce_eager": is_eager}
            found = asyncio.run(
                tokens_of_engine(tmp_path, device="cuda", enable_run_ahead=runs_ahead, **settings)
            )
            assert_same_tokens(found, expected, (backend, is_eager, runs_ahead))
    pieces: dict[str, Any] = {"attention_backend": "triton", "cudagraph_mode": "full_and_piecewise"}
    for runs_ahead in (True, False):
        found = asyncio.run(tokens_of_engine(tmp_path, device="cuda", enable_run_ahead=runs_ahead, **pieces))
        assert_same_tokens(found, expected, ("pieces", runs_ahead))


@pytest.mark.parametrize("all_reduce", ("nccl", "symmetric") if torch.cuda.device_count() > 1 else ())
def test_two_gpus_equal_the_cpu_in_float32(tmp_path: Path, all_reduce: str) -> None:
    """Two ranks of one engine, with and without graphs that hold their sums."""
    make_model(tmp_path, "llama")
    expected = asyncio.run(tokens_of_engine(tmp_path, device="cpu"))
    for mode in ("none", "full_decode_only", "full_and_piecewise"):
        settings: dict[str, Any] = {"tensor_parallel_size": 2, "all_reduce": all_reduce}
        found = asyncio.run(
            tokens_of_engine(
                tmp_path, device="cuda", attention_backend="triton", cudagraph_mode=mode, **settings
            )
        )
        assert_same_tokens(found, expected, (all_reduce, mode))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_handover_gives_the_tokens_of_the_cpu(tmp_path: Path, transport: str) -> None:
    """In float32, with prompts of several chunks and layer groups."""
    make_model(tmp_path, "llama")
    expected = asyncio.run(tokens_of_engine(tmp_path, device="cpu"))
    for mode in ("full_decode_only", "full_and_piecewise"):
        found = asyncio.run(tokens_of_pair(tmp_path, transport, device="cuda", cudagraph_mode=mode))
        assert_same_tokens(found, expected, (transport, mode))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("block_size", [8, 32])
def test_blocks_that_are_converted_on_the_device_give_the_tokens_of_the_cpu(
    tmp_path: Path, transport: str, block_size: int
) -> None:
    """The prefill engine has blocks of 16 tokens."""
    make_model(tmp_path, "llama")
    expected = asyncio.run(tokens_of_engine(tmp_path, device="cpu"))
    found = asyncio.run(tokens_of_pair(tmp_path, transport, {"block_size": block_size}, device="cuda"))
    assert_same_tokens(found, expected, (transport, block_size))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_give_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    expected = asyncio.run(tokens_of_engine(tmp_path, device="cpu"))
    found = asyncio.run(tokens_of_engine(tmp_path, device="cuda", tensor_parallel_size=2))
    assert_same_tokens(found, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (2, 2)], ids=["2 to 1", "1 to 2", "2 to 2"])
def test_a_handover_between_numbers_of_ranks_gives_the_tokens_of_the_cpu(
    tmp_path: Path, transport: str, ranks: tuple[int, int]
) -> None:
    make_model(tmp_path, "llama")
    expected = asyncio.run(tokens_of_engine(tmp_path, device="cpu"))
    sender, receiver = ranks
    found = asyncio.run(
        tokens_of_pair(
            tmp_path,
            transport,
            {"tensor_parallel_size": receiver},
            device="cuda",
            tensor_parallel_size=sender,
        )
    )
    assert_same_tokens(found, expected, (transport, ranks))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_bfloat16_handover_gives_the_tokens_of_one_engine(tmp_path: Path, transport: str) -> None:
    """The receiver has the sender's KV bit for bit, so it emits the tokens of one engine that takes the same steps."""
    make_model(tmp_path, "llama", head_dim=128)
    for backend in usable_backends(CUDA, 128):
        settings: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "attention_backend": backend}
        expected = asyncio.run(tokens_of_engine(tmp_path, at_once=False, **settings))
        found = asyncio.run(tokens_of_pair(tmp_path, transport, **settings))
        assert_same_tokens(found, expected, (backend, transport))


def test_bfloat16_graphs_give_the_tokens_of_eager_steps(tmp_path: Path) -> None:
    """Rounding may choose another token between near ones, and all later tokens then differ: more than half are equal."""
    make_model(tmp_path, "llama", head_dim=128)
    for backend in usable_backends(CUDA, 128):
        settings: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "attention_backend": backend}
        eager = asyncio.run(tokens_of_engine(tmp_path, enforce_eager=True, **settings))
        graphed = asyncio.run(tokens_of_engine(tmp_path, **settings))
        assert share_of_equal(graphed, eager) > 0.5, backend
