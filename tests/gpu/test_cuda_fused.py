"""`make gpu-check`: the fused operations on CUDA against torch's modules on the CPU."""

from pathlib import Path

import pytest
import torch

from engine.attention.backend import create_backend
from engine.compute.forward import fused
from engine.compute.forward_plain import PlainForward
from engine.compute.profiling import profile_inputs
from engine.models.config import DecoderConfig
from engine.models.decoder import CausalLM
from engine.models.loading import load
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.fused_cases import HEADS, check_gate, check_norm, check_turn

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CUDA = torch.device("cuda", 0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_operations_equal_the_modules(dtype: torch.dtype) -> None:
    for size in (24, 896, 1536, 4096, 5120):
        check_norm(size, dtype, CUDA)
    for sizes in (*HEADS, (32, 8, 128), (28, 4, 128)):
        for has_norms in (False, True):
            check_turn(sizes, dtype, CUDA, has_norms=has_norms)
    for size in (3, 96, 8960, 14336):
        check_gate(size, dtype, CUDA)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_equals_its_modules(tmp_path: Path, family: str) -> None:
    """In float32, without a cache; the golden tests check the rest."""
    make_checkpoint(tmp_path, family)
    states = {}
    for device in (torch.device("cpu"), CUDA):
        loaded = load(tmp_path, "float32", None, device)
        assert isinstance(loaded.model, CausalLM)
        assert isinstance(loaded.config, DecoderConfig)
        model = loaded.model if device.type == "cpu" else fused(loaded.model, loaded.config, "triton")
        with torch.inference_mode():
            forward = PlainForward(model, create_backend("torch"), 16, device)
            states[device.type] = forward.forward(profile_inputs([5, 1, 9]), None).cpu()
    torch.testing.assert_close(states["cuda"], states["cpu"], atol=1e-4, rtol=1e-4)
