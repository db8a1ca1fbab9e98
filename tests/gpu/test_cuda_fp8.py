"""`make gpu-check`: FP8 matmul on CUDA, against the same layers on the CPU."""

import asyncio
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.fp8.linear import FP8, LARGEST, SMALLEST_SCALE, Fp8Linear, by_scale, by_token
from engine.models.linear import DenseLinear
from engine.models.loading import load
from tests.checkpoints import make_checkpoint
from tests.fp8_checkpoints import FIXED, TOKEN, make_fp8, quantization
from tests.gpu.golden_cases import distance, make_model, scores_of_engine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _needs_units() -> None:
    if torch.cuda.get_device_capability(CUDA) < (8, 9):
        pytest.skip("the GPU has no units for FP8")


@pytest.mark.parametrize("input_scale", [None, 0.02])
@pytest.mark.parametrize("size", [64, 4096, 14336])
def test_numbers_are_those_of_the_cpu(input_scale: float | None, size: int) -> None:
    """Bit by bit, by our kernel."""
    from engine.fused.rows import quantised

    states = torch.randn(17, size, generator=torch.Generator().manual_seed(1)).bfloat16()
    scale = None if input_scale is None else torch.tensor([input_scale])
    expected = by_token(states) if scale is None else by_scale(states, scale)
    on_device = None if scale is None else scale.to(CUDA)
    numbers, scales = quantised(states.to(CUDA), on_device, LARGEST, SMALLEST_SCALE)
    assert torch.equal(scales.cpu(), expected[1])
    assert torch.equal(numbers.cpu().view(torch.uint8), expected[0].view(torch.uint8))


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 17, 256])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 48), (4096, 6144), (14336, 4096)])
def test_products_are_those_of_the_cpu(num_tokens: int, num_inputs: int, num_outputs: int) -> None:
    generator = torch.Generator().manual_seed(2)
    layer = Fp8Linear(DenseLinear(num_inputs, num_outputs, bias=False), False, None)
    layer.weight = nn.Parameter(torch.randn(num_outputs, num_inputs, generator=generator).to(FP8), False)
    layer.weight_scale = nn.Parameter(torch.rand(num_outputs, 1, generator=generator) + 0.5, False)
    states = torch.randn(num_tokens, num_inputs, generator=generator).bfloat16()
    expected = layer(states).float()
    found = layer.to(CUDA)(states.to(CUDA)).cpu().float()
    assert float((found - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("inputs", [TOKEN, FIXED])
def test_weights_take_a_byte_on_the_device(tmp_path: Path, inputs: dict[str, object]) -> None:
    source = make_checkpoint(tmp_path / "source")
    fp8 = make_fp8(source, tmp_path / "fp8", quantization("channel", inputs))
    loaded = load(fp8, "bfloat16", None, CUDA)
    layers = [module for module in loaded.model.modules() if isinstance(module, Fp8Linear)]
    assert len(layers) == 7 * 2
    assert all(layer.weight.is_cuda and layer.weight.element_size() == 1 for layer in layers)


@pytest.mark.parametrize("inputs", [TOKEN, FIXED])
def test_an_engine_scores_as_the_cpu_does(tmp_path: Path, inputs: dict[str, object]) -> None:
    """Both round to bfloat16 in their own places; neither is farther from the exact sums in float32.

    Answers are no measure: after a token that rounding has changed, all others differ too.
    """
    source = make_model(tmp_path / "source", "llama")
    fp8 = make_fp8(source, tmp_path / "fp8", quantization("channel", inputs))
    found = asyncio.run(scores_of_engine(fp8, device="cuda", dtype="bfloat16", attention_backend="triton"))
    on_cpu, exact = (
        asyncio.run(scores_of_engine(fp8, device="cpu", dtype=dtype, fp8_products="on"))
        for dtype in ("bfloat16", "float32")
    )
    assert distance(found, exact) < 1.5 * distance(on_cpu, exact)
