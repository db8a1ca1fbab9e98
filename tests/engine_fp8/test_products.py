"""Products of FP8 numbers: rounding, rows that do not depend on each other, layers that are joined, and the choice."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from contract.errors import SettingError
from engine.fp8.linear import FP8, LARGEST, Fp8Linear, by_scale, by_token, product, why_dequantized
from engine.fp8.scheme import Fp8Scheme
from engine.fp8.stored import Fp8Checkpoint
from engine.models.checkpoint import Checkpoint
from engine.models.linear import DenseLinear, joined
from engine.models.sharding import Part, Piece
from engine.quantisation.stored import read_scheme
from tests.checkpoints import make_checkpoint
from tests.fp8_checkpoints import make_fp8, quantization

GPU = torch.device("cuda", 0)


def layer(
    num_inputs: int, num_outputs: int, *, bias: bool = False, input_scale: float | None = None
) -> Fp8Linear:
    """A layer with random weights."""
    generator = torch.Generator().manual_seed(num_outputs)
    made = Fp8Linear(DenseLinear(num_inputs, num_outputs, bias=bias), input_scale is not None, None)
    made.weight = nn.Parameter(torch.randn(num_outputs, num_inputs, generator=generator).to(FP8), False)
    made.weight_scale = nn.Parameter(torch.rand(num_outputs, 1, generator=generator) + 0.5, False)
    if input_scale is not None:
        made.input_scale = nn.Parameter(torch.tensor([input_scale]), False)
    return made


def test_the_largest_number_of_a_token_is_the_largest_of_fp8() -> None:
    states = torch.tensor([[1.0, -2.0, 0.25], [0.0, 0.0, 0.0], [1e5, 1.0, -1e5]])
    numbers, scale = by_token(states)
    assert numbers.float().abs().amax(-1).tolist() == [LARGEST, 0.0, LARGEST]
    assert torch.allclose(numbers.float() * scale, states, rtol=2**-4, atol=1e5 * 2**-10)
    assert by_token(torch.full((1, 16), float("nan")))[0].float().isnan().all()


def test_a_fixed_scale_cuts_larger_numbers() -> None:
    numbers, scale = by_scale(torch.tensor([[1.0, 1000.0], [-1000.0, 0.5]]), torch.tensor([0.5]))
    assert numbers.float().tolist() == [[2.0, LARGEST], [-LARGEST, 1.0]]
    assert scale.tolist() == [[0.5], [0.5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("input_scale", [None, 0.02])
def test_a_row_does_not_depend_on_other_rows(dtype: torch.dtype, input_scale: float | None) -> None:
    """Law 6 needs equal logits for equal tokens in any batch."""
    made = layer(64, 48, input_scale=input_scale)
    states = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    alone = torch.cat([made(row[None]) for row in states])
    assert alone.dtype == dtype
    large = torch.cat([1e3 * states[:4], states])
    assert torch.allclose(made(large)[4:], alone, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-3)
    exact = product(states.float(), made.weight, made.weight_scale, made.stored_input_scale)
    assert torch.allclose(alone.float(), exact, rtol=2e-2, atol=0.2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("first", "second"), [(None, None), (0.02, 0.02), (0.02, 0.05)])
def test_joined_layers_give_their_own_results(bias: bool, first: float | None, second: float | None) -> None:
    layers = [layer(64, 48, bias=bias, input_scale=first), layer(64, 32, bias=bias, input_scale=second)]
    for each in layers:
        if bias:
            each.bias = nn.Parameter(torch.randn(each.out_features), False)
    states = torch.randn(5, 64)
    expected = torch.cat([each(states) for each in layers], dim=-1)
    whole = joined(*layers)
    assert torch.allclose(whole(states), expected, rtol=1e-5, atol=1e-5)
    assert torch.allclose(torch.cat([each(states) for each in layers], dim=-1), expected)
    is_one = layers[0].weight.untyped_storage().data_ptr() == layers[1].weight.untyped_storage().data_ptr()
    assert is_one == (first == second)


def test_a_layer_that_is_not_quantised_is_joined_beside_others() -> None:
    plain = DenseLinear(64, 16)
    made = layer(64, 32)
    states = torch.randn(3, 64)
    assert torch.equal(joined(made, plain)(states), torch.cat([made(states), plain(states)], dim=-1))


@pytest.fixture
def stored(tmp_path: Path) -> Fp8Checkpoint:
    fp8 = make_fp8(make_checkpoint(tmp_path / "source"), tmp_path / "fp8", quantization())
    scheme = read_scheme({"quantization_config": quantization()})
    assert isinstance(scheme, Fp8Scheme)
    return Fp8Checkpoint(Checkpoint(fp8), scheme)


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ((9, 0), torch.bfloat16, None),
        ((8, 9), torch.bfloat16, None),
        ((10, 0), torch.bfloat16, None),
        ((8, 0), torch.bfloat16, "the GPU's compute capability is 8.0, below 8.9"),
        ((9, 0), torch.float16, "they give bfloat16, and the dtype is float16"),
        ((9, 0), torch.float32, "they give bfloat16, and the dtype is float32"),
    ],
)
def test_a_gpu_with_units_for_fp8_multiplies_them(
    stored: Fp8Checkpoint,
    capability: tuple[int, int],
    dtype: torch.dtype,
    reason: str | None,
) -> None:
    assert why_dequantized("auto", dtype, GPU, stored, capability) == reason
    assert why_dequantized("off", dtype, GPU, stored, capability) == "fp8_products is off"
    if reason is None:
        assert why_dequantized("on", dtype, GPU, stored, capability) is None
        return
    with pytest.raises(SettingError, match="fp8_products is on, but"):
        why_dequantized("on", dtype, GPU, stored, capability)


def test_a_part_of_a_weight_has_the_scales_of_its_rows(stored: Fp8Checkpoint) -> None:
    rows = Part(0, 64, 32, (Piece(0, 32, 32),))
    columns = Part(1, 96, 48, (Piece(0, 48, 48),))
    name = "model.layers.1.mlp.down_proj"
    whole: Tensor = stored.tensor(f"{name}.weight")
    assert torch.equal(stored.part(f"{name}.weight", rows), whole[32:])
    assert torch.equal(stored.part(f"{name}.weight", columns), whole[:, 48:])
    stored.multiplied = frozenset({name})
    numbers = stored.part(f"{name}.weight", rows)
    scales = stored.part(f"{name}.weight_scale", rows)
    assert numbers.dtype == FP8
    assert torch.equal(numbers.float() * scales, whole[32:])
