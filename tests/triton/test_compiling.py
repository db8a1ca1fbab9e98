"""The kernels compiled for a data-centre GPU, on any machine: properties that the interpreter cannot show."""

from pathlib import Path

import pytest

from engine.kv_cache.folding import NUM_TILES, NUM_WARPS, TILE
from tests.triton.compiled import compiled

pytestmark = pytest.mark.triton

SHARED_BYTES = 227 * 1024
RESERVED_BYTES = 1024
STACK_BYTES = 64
REGISTERS = 65536


def test_kernels_compile_for_compute_capability_90(tmp_path: Path) -> None:
    """They fit into memory and registers, use tensor cores, load ahead, store 16 bytes at a time, and are compiled once."""
    kernels = compiled(tmp_path, "-m", "tests.triton.compile_program", "90")
    assert len(kernels) == 35
    for kernel in kernels:
        assert not kernel["varying"], kernel
        assert kernel["shared"] < SHARED_BYTES, kernel
        assert kernel["stack"] < STACK_BYTES, kernel
        at_once = kernel["at_once"]
        assert at_once * (kernel["shared"] + RESERVED_BYTES) <= SHARED_BYTES + RESERVED_BYTES, kernel
        assert at_once * kernel["threads"] * -(-kernel["registers"] // 8) * 8 <= REGISTERS, kernel
        if kernel["kernel"] == "fold_kernel":
            assert kernel["stack"] == 0, kernel
            assert kernel["loads_ahead"] == TILE * NUM_TILES // (32 * NUM_WARPS), kernel
        if kernel["kernel"] in ("prefill_kernel", "split_kernel"):
            assert kernel["copies_ahead"], kernel
            assert (kernel["in_flight"] > 0) == (kernel["head_dim"] <= 128), kernel
            assert kernel["tensor_cores"] or kernel["dtype"] == "fp32", kernel
        if kernel["kernel"] == "store_kernel":
            assert kernel["widest_store"] == 128, kernel
            assert kernel["threads"] >= 64 or kernel["head_dim"] < 128, kernel
    assert sum(kernel["at_once"] == 3 for kernel in kernels) == 3, "decodes of heads up to 128"
