"""The one interface by which forward passes multiply: a layer of another kind is used by every pass, or its model refused.

``tests/triton/test_fused_decoder.py`` has the fused pass, which needs Triton.
"""

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from contract.errors import InternalError
from engine.attention.backend import create_backend
from engine.compute.forward import forward_pass
from engine.compute.forward_plain import PlainForward
from engine.compute.profiling import profile_inputs
from engine.kernels.binding import PANEL, CLinear, Kernels
from engine.kernels.packed import PackedWeights, num_panels
from engine.models.config import DecoderConfig
from engine.models.decoder import CausalLM
from engine.models.linear import DenseLinear, LinearOp, Product, SideBySide, joined
from engine.models.loading import LoadedModel, load
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from tests.linear_ops import Doubled, DoubledMatrix, double_weights, linear_ops, replace_layers

CPU = torch.device("cpu")
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


def model_of(loaded: LoadedModel) -> tuple[CausalLM, DecoderConfig]:
    assert isinstance(loaded.model, CausalLM)
    assert isinstance(loaded.config, DecoderConfig)
    return loaded.model, loaded.config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with biases and a head of its own."""
    return make_checkpoint(tmp_path, "llama", attention_bias=True, mlp_bias=True, head_dim=32)


@torch.inference_mode()
def results(model: CausalLM) -> tuple[Tensor, Tensor]:
    forward = PlainForward(model, create_backend("torch"), 16, CPU)
    states = forward.forward(profile_inputs([5, 1, 3]), None)
    return states, forward.logits(states)


@pytest.mark.parametrize("name", LAYERS)
def test_the_modules_multiply_by_what_the_model_has(folder: Path, name: str) -> None:
    """Each kind of layer alone: a product that bypasses its layer would not be doubled."""
    model, _ = model_of(load(folder, "float32", None, CPU))
    expected, _ = model_of(load(folder, "float32", None, CPU))
    layers = replace_layers(model, Doubled, name)
    double_weights(expected, name)
    for own, other in zip(results(model), results(expected), strict=True):
        torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-5)
    assert [layer.num_calls for layer in layers] == [1] * len(layers) and layers


def test_every_product_of_the_decoder_is_a_linear_op(folder: Path) -> None:
    model, config = model_of(load(folder, "float32", None, CPU))
    names = [name.rpartition(".")[2] for name, _ in linear_ops(model)]
    assert len(names) == 7 * config.num_layers + 1 and set(names) == set(LAYERS)
    assert names == [
        name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)
    ]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_head_is_a_product_too(tmp_path: Path, family: str) -> None:
    """A head of its own or the embedding; its logits in memory that is given are the same."""
    make_checkpoint(tmp_path, family, tie_word_embeddings=family == "qwen2")
    model, config = model_of(load(tmp_path, "float32", None, CPU))
    states = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    head = model.head
    assert head is not None and (head is model.lm_head) is (family == "llama")
    with torch.inference_mode():
        target = torch.empty(3, config.vocab_size)
        model.write_logits(states, target)
        assert torch.equal(model.logits(states), head(states))
    torch.testing.assert_close(target, head(states).detach())


def test_a_head_that_is_only_called_writes_its_logits(folder: Path) -> None:
    model, config = model_of(load(folder, "float32", None, CPU))
    (head,) = replace_layers(model, Doubled, "lm_head")
    states = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    target = torch.empty(3, config.vocab_size)
    with torch.inference_mode():
        model.write_logits(states, target)
        torch.testing.assert_close(target, 2 * states @ head.weight.t())
    assert head.num_calls == 1


def layer(kind: type[DenseLinear], num_outputs: int, *, bias: bool = False) -> DenseLinear:
    made = kind(8, num_outputs, bias=bias)
    generator = torch.Generator().manual_seed(num_outputs)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return made.requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("last", [DenseLinear, DoubledMatrix, Doubled])
@pytest.mark.parametrize("first", [DenseLinear, DoubledMatrix, Doubled])
def test_joined_layers_give_their_own_results_twice(
    first: type[DenseLinear], last: type[DenseLinear], bias: bool
) -> None:
    """Joined in any mixture; a second time too: a matrix that was computed from weights must not replace them."""
    layers = [layer(first, 5, bias=bias), layer(DenseLinear, 3, bias=bias), layer(last, 4, bias=bias)]
    states = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    expected = torch.cat([each(states) for each in layers], dim=-1)
    for _ in range(2):
        whole = joined(*layers)
        assert isinstance(whole, SideBySide if Doubled in (first, last) else Product)
        torch.testing.assert_close(whole(states), expected)
        torch.testing.assert_close(torch.cat([each(states) for each in layers], dim=-1), expected)
    if Doubled not in (first, last):
        assert layers[1].weight.untyped_storage().nbytes() == 12 * 8 * 4


def test_layers_of_which_one_has_a_bias_are_computed_one_by_one() -> None:
    layers = [layer(DenseLinear, 5, bias=True), layer(DenseLinear, 3)]
    states = torch.randn(2, 8)
    whole = joined(*layers)
    assert isinstance(whole, SideBySide)
    assert torch.equal(whole(states), torch.cat([each(states) for each in layers], dim=-1))


class RecordedKernels(Kernels):
    """Records the weights that are packed, instead of packing them."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def pack(self, pool: int, weight: Tensor, packed: Tensor, *places: int) -> None:
        self.weights.append(weight.clone())

    def compress(self, pool: int, panels: Tensor, layer: CLinear) -> int:
        assert len(panels) == num_panels(layer.outputs) * PANEL * layer.inputs
        return 0

    def list_others(self, pool: int, panels: Tensor, layer: CLinear) -> None:
        pass


def packed(model: CausalLM, config: DecoderConfig) -> list[Tensor]:
    kernels = RecordedKernels()
    PackedWeights(model, config, 32, kernels, pool=0)
    return kernels.weights


def test_the_kernels_pack_the_matrix_of_a_layer(folder: Path) -> None:
    """Not its parameter: what is packed of a layer that doubles is double; the memory of both is released."""
    model, config = model_of(load(folder, "bfloat16", None, CPU))
    expected, _ = model_of(load(folder, "bfloat16", None, CPU))
    replace_layers(model, DoubledMatrix, "k_proj", "up_proj", "down_proj", "lm_head")
    double_weights(expected, "k_proj", "up_proj", "down_proj", "lm_head")
    own, other = packed(model, config), packed(expected, config)
    assert len(own) == 7 * config.num_layers + 1
    assert all(torch.equal(*pair) for pair in zip(own, other, strict=True))
    names = [name for name, each in linear_ops(model) if each.weight is not None]
    assert names == ["lm_head"]  # whose logits the model computes as well


def test_a_layer_without_a_matrix_is_not_packed(folder: Path) -> None:
    model, config = model_of(load(folder, "bfloat16", None, CPU))
    replace_layers(model, Doubled, "1.mlp.up_proj")
    with pytest.raises(InternalError, match="no form for a layer of doubled numbers"):
        packed(model, config)


@pytest.mark.parametrize("name", ["1.mlp.down_proj", "lm_head"])
def test_a_model_with_a_layer_that_is_only_called_is_left_to_the_modules(
    folder: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """One layer is enough; the pass that computes the model then uses it."""
    loaded = load(folder, "bfloat16", None, CPU)
    model, _ = model_of(loaded)
    (replaced,) = replace_layers(model, Doubled, name)
    with caplog.at_level(logging.INFO):
        forward = forward_pass(loaded, EngineSettings(model=folder), CPU)
    assert "not the kernels: its weights are multiplied as doubled numbers" in caplog.text
    with torch.inference_mode():
        states = forward.begin(profile_inputs([5, 1]), None)()
        assert states is not None
        forward.logits(states)
    forward.close()
    assert replaced.num_calls == 1


class Least(LinearOp):
    """No more than an implementation must have."""

    form = "nothing"

    def __call__(self, states: Tensor) -> Tensor:
        return states + 1


def test_an_implementation_is_a_call_and_a_name() -> None:
    states = torch.zeros(2, 3)
    least = Least()
    assert joined(least) is least and least.matrix is None and least.total(states) is states
    assert joined(least, least)(states).tolist() == [[1.0] * 6] * 2
    least.forget()
