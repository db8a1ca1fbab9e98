"""A decoder with FP8 weights and fused operations, by Triton's interpreter, against its modules."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.backend import create_backend
from engine.compute.forward import fused
from engine.compute.forward_plain import PlainForward
from engine.compute.profiling import profile_inputs
from engine.fp8.linear import Fp8Linear
from engine.models.config import DecoderConfig
from engine.models.decoder import CausalLM
from engine.models.loading import LoadedModel, load
from tests.checkpoints import make_checkpoint
from tests.fp8_checkpoints import FIXED, TOKEN, make_fp8, quantization

pytestmark = [
    pytest.mark.triton,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings(
        "ignore:Conversion of an array:DeprecationWarning"
    ),  # raised by the interpreter
]

CPU = torch.device("cpu")


def states_of(loaded: LoadedModel, *, is_fused: bool) -> torch.Tensor:
    assert isinstance(loaded.model, CausalLM)
    assert isinstance(loaded.config, DecoderConfig)
    model = fused(loaded.model, loaded.config, "triton") if is_fused else loaded.model
    with torch.inference_mode():
        return PlainForward(model, create_backend("torch"), 16, CPU).forward(profile_inputs([5, 1, 3]), None)


@pytest.mark.parametrize(("family", "inputs"), [("qwen2", TOKEN), ("llama", FIXED)])
def test_joined_products_give_the_states_of_the_modules(
    tmp_path: Path, family: str, inputs: dict[str, Any]
) -> None:
    """Layers that read the same states are one product of FP8, with their biases; their weights become its views."""
    fp8 = make_fp8(
        make_checkpoint(tmp_path / "source", family), tmp_path / "fp8", quantization("tensor", inputs)
    )
    loaded = [load(fp8, "float32", None, CPU, fp8_products="on") for _ in range(2)]
    found = states_of(loaded[0], is_fused=True)
    expected = states_of(loaded[1], is_fused=False)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    layers = [module for module in loaded[0].model.modules() if isinstance(module, Fp8Linear)]
    matrices = {layer.weight.untyped_storage().data_ptr() for layer in layers}
    assert (len(layers), len(matrices)) == (14, 8)
