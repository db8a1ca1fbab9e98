"""`make gpu-check`: the fused operations on CUDA against torch's modules on the CPU."""

from pathlib import Path

import pytest
import torch

from engine.attention.backend import create_backend
from engine.compute.forward_plain import PlainForward
from engine.compute.profiling import profile_inputs
from engine.fused.small_batch_tiles import Form, Tiles, tiles_of
from engine.models.config import DecoderConfig
from engine.models.decoder import CausalLM
from engine.models.language_model import LanguageModel
from engine.models.loading import load
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.fused_cases import HEADS, check_gate, check_norm, check_turn
from tests.small_batch_cases import ROW, ROWS, SPLIT, FewCase, check_few_rows, check_rows_alone

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CUDA = torch.device("cuda", 0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MEASURED = {
    Form.NORMED: [(6144, 4096), (2048, 1536)],
    Form.GATED: [(28672, 4096), (17920, 1536)],
    Form.ADDED: [(4096, 14336), (4096, 4096), (1536, 8960), (1536, 1536)],
    Form.PLAIN: [(128256, 4096), (151936, 1536)],
}
"""Outputs and inputs of products of Llama 3.1 8B and Qwen 2.5 1.5B."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_operations_equal_the_modules(dtype: torch.dtype) -> None:
    for size in (24, 896, 1536, 4096, 5120):
        check_norm(size, dtype, CUDA)
    for sizes in (*HEADS, (32, 8, 128), (28, 4, 128)):
        for has_norms in (False, True):
            check_turn(sizes, dtype, CUDA, has_norms=has_norms)
    for size in (3, 96, 8960, 14336):
        check_gate(size, dtype, CUDA)


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_few_rows_equal_torch(dtype: torch.dtype, form: Form) -> None:
    """Whole and broken tiles, and the first outputs of the measured sizes; in float32 large tiles would not fit."""
    is_split = form in (Form.ADDED, Form.PLAIN)
    for tiles, num_tokens in ((ROW, 1), (ROWS, 16), (ROWS, 3), *([(SPLIT, 29)] if is_split else [])):
        for sizes in ((256, 48), (330, 37), (1536, 512)):
            check_few_rows(FewCase(form, tiles, num_tokens, *sizes), dtype, CUDA, has_bias=True)
    if dtype == torch.float32:
        return
    for num_outputs, num_inputs in MEASURED[form]:
        for num_tokens in (1, 3, 16, 64):
            measured = tiles_of(form, num_tokens, num_outputs, num_inputs)
            if measured is not None:
                check_few_rows(
                    FewCase(form, measured, num_tokens, num_inputs, 500), dtype, CUDA, has_bias=False
                )


@pytest.mark.parametrize("tiles", [ROWS, SPLIT])
def test_a_row_does_not_depend_on_others(tiles: Tiles) -> None:
    check_rows_alone(FewCase(Form.ADDED, tiles, 13, 1536, 512), torch.bfloat16, CUDA)


@pytest.mark.parametrize("has_small_batch", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_equals_its_modules(tmp_path: Path, family: str, has_small_batch: bool) -> None:
    """In float32, without a cache; the golden tests check the rest."""
    make_checkpoint(tmp_path, family)
    states = {}
    for device in (torch.device("cpu"), CUDA):
        loaded = load(tmp_path, "float32", None, device)
        assert isinstance(loaded.model, CausalLM)
        assert isinstance(loaded.config, DecoderConfig)
        model: LanguageModel = loaded.model
        if device.type == "cuda":
            from engine.fused.decoder import FusedDecoder
            from engine.fused.small_batch import SmallBatch

            small_batch = SmallBatch(CUDA, [torch.float32] if has_small_batch else [])
            model = FusedDecoder(loaded.model, loaded.config, small_batch)
        with torch.inference_mode():
            forward = PlainForward(model, create_backend("torch"), 16, device)
            states[device.type] = forward.forward(profile_inputs([5, 1, 9]), None).cpu()
    torch.testing.assert_close(states["cuda"], states["cpu"], atol=1e-4, rtol=1e-4)
