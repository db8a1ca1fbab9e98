"""The golden tests' own cases, on the CPU: every request is served whole, in chunks and layer groups, and is compared."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.settings import process_environment
from tests.gpu.golden_cases import (
    LENGTHS,
    MAX_STEP_TOKENS,
    NUM_ANSWERS,
    Tokens,
    assert_same_tokens,
    distance,
    make_model,
    share_of_equal,
    tokens_of_engine,
    tokens_of_pair,
)

ROOT = Path(__file__).parents[2]


def test_every_request_is_served_whole(tmp_path: Path) -> None:
    """A request that is refused gives no tokens on any device, which would be equal."""
    make_model(tmp_path, "llama")
    alone = asyncio.run(tokens_of_engine(tmp_path, at_once=False, device="cpu"))
    handed_over = asyncio.run(tokens_of_pair(tmp_path, "tcp", device="cpu"))
    assert_same_tokens(handed_over, alone)
    assert max(LENGTHS) > 2 * MAX_STEP_TOKENS


@pytest.mark.slow
def test_every_request_is_served_whole_by_several_ranks(tmp_path: Path) -> None:
    """On the CPU, as the cases for several GPUs: alone, and handed over to another number of ranks."""
    make_model(tmp_path, "llama")
    alone = asyncio.run(tokens_of_engine(tmp_path, at_once=False, device="cpu"))
    ranks = asyncio.run(tokens_of_engine(tmp_path, at_once=False, device="cpu", tensor_parallel_size=2))
    assert_same_tokens(ranks, alone)
    handed_over = asyncio.run(
        tokens_of_pair(tmp_path, "tcp", {"tensor_parallel_size": 1}, device="cpu", tensor_parallel_size=2)
    )
    assert_same_tokens(handed_over, alone)


def test_a_comparison_of_nothing_fails() -> None:
    whole = [[7] * NUM_ANSWERS] * len(LENGTHS)
    assert_same_tokens(whole, whole)
    assert share_of_equal(whole, whole) == 1.0
    partials: list[Tokens] = [[[]] * len(LENGTHS), [], [*whole[1:], []], [*whole[1:], whole[0][1:]]]
    for partial in partials:
        with pytest.raises(AssertionError):
            assert_same_tokens(partial, partial)
        with pytest.raises(ValueError, match="tokens are compared"):
            share_of_equal(partial, partial)
    with pytest.raises(ValueError, match="nothing is compared"):
        distance([], [])
    assert distance([1.0, 2.0], [1.0, 4.0]) == 2.0**0.5
    with pytest.raises(AssertionError, match="the prompt of 700 tokens"):
        assert_same_tokens([*whole[1:], [*whole[0][1:], 8]], whole)


@pytest.mark.slow
def test_the_gpu_tests_are_collected_by_pytest_alone() -> None:
    """Without plug-ins and under their own configuration, on a machine that has no GPU either."""
    arguments = [
        "-c",
        "tests/gpu/alone.ini",
        "--rootdir",
        ".",
        "-m",
        "gpu",
        "tests/gpu",
        "--collect-only",
        "-q",
    ]
    for plugin in ("asyncio", "timeout", "xdist", "cacheprovider"):
        arguments += ["-p", f"no:{plugin}"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        env=process_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "test_cuda_equals_cpu_in_float32[llama]" in result.stdout
    assert "rror" not in result.stdout
