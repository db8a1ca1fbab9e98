"""The kernel that quantises inputs, by Triton's interpreter against its twin on the CPU, and compiled for sm_90."""

from pathlib import Path

import pytest
import torch

from engine.fp8.linear import LARGEST, SMALLEST_SCALE, by_scale, by_token
from tests.triton.compiled import compiled

pytestmark = pytest.mark.triton

_COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.fused.rows import num_warps_of, power_of_two
from engine.fp8.triton_kernels import quantise_kernel
from tests.triton.compile_program import used
for size in (4096, 14336):
    for is_fixed in (False, True):
        padded = power_of_two(size)
        names = quantise_kernel.arg_names
        constants = {"size": size, "padded": padded, "is_fixed": is_fixed}
        kinds = {"states": "*bf16", "numbers": "*fp8e4nv", "largest": "fp32", "smallest": "fp32"}
        signature = {n: "constexpr" if n in constants else kinds.get(n, "*fp32") for n in names}
        source = ASTSource(
            quantise_kernel,
            signature,
            {(names.index(n),): value for n, value in constants.items()},
            {(names.index(n),): [["tt.divisibility", 16]] for n in ("states", "numbers", "scales", "fixed_scale")},
        )
        result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps_of(padded)})
        print(json.dumps({**used(quantise_kernel, result), "has_fp8": "e4m3x2" in result.asm["ptx"]}))
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [64, 96, 4096])
@pytest.mark.parametrize("input_scale", [None, 0.007])
def test_numbers_and_scales_are_those_of_the_twin(
    dtype: torch.dtype, size: int, input_scale: float | None
) -> None:
    from engine.fused.rows import quantised

    states = torch.randn(5, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    states[1] = 0.0
    states[2] *= 1000.0
    states[3, 0] = states[3].abs().max() * 30
    scale = None if input_scale is None else torch.tensor([input_scale])
    numbers, scales = quantised(states, scale, LARGEST, SMALLEST_SCALE)
    expected = by_token(states) if scale is None else by_scale(states, scale)
    assert torch.equal(scales, expected[1])
    rounded = is_rounded_alike(states.float() / scales, expected[0])
    assert torch.equal(numbers.view(torch.uint8)[rounded], expected[0].view(torch.uint8)[rounded])
    assert rounded.sum() > 0.8 * numbers.numel()


def is_rounded_alike(exact: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return where the interpreter rounds to FP8 as a device does.

    It loses a carry into the exponent, cuts small numbers, and rounds what lies in the middle up.
    """
    bits = numbers.view(torch.uint8)
    is_power = (bits & 0b111) == 0
    is_small = (bits & 0b1111000) == 0
    is_between = (exact.view(torch.int32) & 0xFFFFF) == 0x80000
    return ((bits & 0b1111111) == 0) | ~(is_power | is_small | is_between)


def test_a_row_that_is_no_number_stays_so() -> None:
    """A request whose logits are not numbers is found by them; its neighbours are not affected."""
    from engine.fused.rows import quantised

    states = torch.randn(3, 64)
    states[1, 5] = torch.nan
    numbers, scales = quantised(states, None, LARGEST, SMALLEST_SCALE)
    assert (numbers.float() * scales).isnan().any(-1).tolist() == [False, True, False]


def test_it_compiles_for_compute_capability_90(tmp_path: Path) -> None:
    """It converts by the hardware's instruction and spills no register, for the widths of an 8B model."""
    kernels = compiled(tmp_path, "-c", _COMPILE)
    assert len(kernels) == 4
    for kernel in kernels:
        assert kernel["has_fp8"], kernel
        assert kernel["stack"] == 0, kernel
