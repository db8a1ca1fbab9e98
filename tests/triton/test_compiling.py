"""The kernels compiled for a data-centre GPU, on any machine: properties that the interpreter cannot show."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine.compute.best_tokens import TILE as BEST_TILE
from engine.kv_cache.memory import NUM_TILES, NUM_WARPS, TILE
from tests.triton.compiled import compiled

pytestmark = pytest.mark.triton

SHARED_BYTES = 227 * 1024
SMALL_SHARED_BYTES = 99 * 1024
RESERVED_BYTES = 1024
STACK_BYTES = 64
REGISTERS = 65536
RESIDENT_PROGRAMS = {"survey_kernel": 8, "gather_kernel": 7, "choose_kernel": 2, "combine_kernel": 28}
"""Programs which a multiprocessor holds at once, of heads of up to 128: they hide the latency of loads and of sums."""

OVERLAPPING = {
    "norm_kernel",
    "rope_kernel",
    "gate_kernel",
    "split_kernel",
    "combine_kernel",
    "best_kernel",
    "tokens_kernel",
}
"""Kernels that begin while the one ahead of them ends."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Compile all kernels, but for products of small batches."""
    return compiled(tmp_path_factory.mktemp("cache"), "-m", "tests.triton.compile_program", "90")


def registers_of(kernel: dict[str, Any]) -> int:
    """Return the registers of a program."""
    return int(kernel["threads"]) * -(-int(kernel["registers"]) // 8) * 8


def test_kernels_compile_for_compute_capability_90(kernels: list[dict[str, Any]]) -> None:
    """They fit into memory and registers, use tensor cores, load ahead, store 16 bytes at a time, and are compiled once."""
    assert len(kernels) == 45
    for kernel in kernels:
        assert not kernel["varying"], kernel
        assert kernel["shared"] < SHARED_BYTES, kernel
        assert kernel["stack"] < STACK_BYTES, kernel
        at_once = kernel["at_once"]
        assert at_once * (kernel["shared"] + RESERVED_BYTES) <= SHARED_BYTES + RESERVED_BYTES, kernel
        assert at_once * registers_of(kernel) <= REGISTERS, kernel
        if kernel["kernel"] == "fold_kernel":
            assert kernel["stack"] == 0, kernel
            assert kernel["loads_ahead"] == TILE * NUM_TILES // (32 * NUM_WARPS), kernel
        if kernel["kernel"] in ("prefill_kernel", "split_kernel"):
            assert kernel["copies_ahead"], kernel
            assert (kernel["in_flight"] > 0) == (kernel["head_dim"] <= 128), kernel
            assert kernel["tensor_cores"] or kernel["dtype"] == "fp32", kernel
        if kernel["kernel"] in RESIDENT_PROGRAMS and kernel["head_dim"] <= 128:
            assert registers_of(kernel) * RESIDENT_PROGRAMS[kernel["kernel"]] <= REGISTERS, kernel
        if kernel["kernel"] == "best_kernel":
            assert kernel["stack"] == 0, kernel
            assert kernel["loads_ahead"] == BEST_TILE // (8 * kernel["threads"]), kernel
        if kernel["kernel"] == "rope_kernel":
            assert kernel["stack"] == 0, kernel
            assert kernel["widest_store"] == 128, kernel
        if kernel["kernel"] == "store_kernel":
            assert kernel["widest_store"] == 128, kernel
            assert kernel["threads"] >= 64 or kernel["head_dim"] < 128, kernel
    held = Counter(kernel["at_once"] for kernel in kernels if kernel["at_once"] > 2)
    assert held == {3: 4, 4: 2}, "decodes of heads up to 128, with single and with joined splits"


def test_kernels_that_begin_early_wait_before_they_write(kernels: list[dict[str, Any]]) -> None:
    """Else they would overwrite what the kernel ahead, or one before it, still reads."""
    waiting = [kernel for kernel in kernels if kernel["waits"]]
    assert {kernel["kernel"] for kernel in waiting} == OVERLAPPING
    assert all(kernel["waits"] for kernel in kernels if kernel["kernel"] in OVERLAPPING)
    assert not any(kernel["early_stores"] for kernel in waiting)


@pytest.mark.slow
def test_attention_fits_into_the_shared_memory_of_small_cards(tmp_path: Path) -> None:
    """A program of an RTX 5090 has 99 KiB, less than half of an H100's: more is an error at the first launch."""
    kernels = compiled(tmp_path, "-m", "tests.triton.compile_program", "120", "attention")
    assert {kernel["kernel"] for kernel in kernels} == {"prefill_kernel", "split_kernel"}
    assert max(kernel["shared"] for kernel in kernels) == 99_328 <= SMALL_SHARED_BYTES


def test_products_of_few_rows_compile_for_compute_capability_90(tmp_path: Path) -> None:
    """One row reads 16 bytes at a time; more rows use tensor cores and load ahead; all overlap the kernels beside them."""
    kernels = compiled(tmp_path, "-m", "tests.triton.compile_small_batch", "90")
    assert {kernel["rows"] for kernel in kernels} == {1, 16, 64}
    for kernel in kernels:
        assert kernel["shared"] < SHARED_BYTES, kernel
        assert kernel["stack"] == 0, kernel
        assert kernel["overlaps"] == 2, kernel
        if kernel["rows"] == 1:
            assert kernel["widest_load"] == 128, kernel
            assert kernel["registers"] <= 128, kernel
        else:
            assert kernel["tensor_cores"], kernel
            assert kernel["in_flight"] > 0, kernel
