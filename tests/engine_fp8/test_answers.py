"""Models with FP8 weights: dequantized at load, and by FP8 matmul; both equal to transformers, token by token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.fp8.linear import Fp8Linear
from engine.models.loading import load
from tests.checkpoints import load_reference, make_checkpoint, reference_greedy
from tests.engine_compute.driver import Driver
from tests.engine_compute.test_equals_transformers import NUM_TOKENS, PROMPTS
from tests.fp8_checkpoints import FIXED, INPUT_SCALE, TOKEN, make_fp8, make_twin, quantization

CPU = torch.device("cpu")
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "channel-token": ("llama", {}, quantization()),
    "tensor-token": ("qwen3", {"tie_word_embeddings": True}, quantization("tensor")),
    "channel-fixed": ("qwen2", {}, quantization("channel", FIXED)),
    "tensor-fixed": ("mistral", {"sliding_window": 6}, quantization("tensor", FIXED)),
}


@pytest.fixture(params=VARIANTS)
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, dict[str, Any]]:
    """A checkpoint with FP8 weights, its twin, and the quantisation."""
    family, overrides, config = VARIANTS[request.param]
    source = make_checkpoint(tmp_path / "source", family, seed=3, **overrides)
    fp8 = make_fp8(source, tmp_path / "fp8", config)
    return fp8, make_twin(fp8, tmp_path / "twin"), config


def answers(folder: Path, chunk: int, **settings: Any) -> dict[str, list[int]]:
    driver = Driver(folder, **settings)
    try:
        for name, prompt in PROMPTS.items():
            driver.add(name, prompt)
        return driver.generate(list(PROMPTS), NUM_TOKENS, chunk)
    finally:
        driver.executor.shutdown()


def test_converted_weights_give_the_tokens_of_the_twin(folders: tuple[Path, Path, dict[str, Any]]) -> None:
    fp8, twin, _ = folders
    reference = load_reference(twin)
    expected = {name: reference_greedy(reference, prompt, NUM_TOKENS) for name, prompt in PROMPTS.items()}
    assert len({tuple(answer) for answer in expected.values()}) == len(PROMPTS)
    assert answers(fp8, 7) == expected


def test_converted_weights_are_those_of_the_twin_in_16_bits(
    folders: tuple[Path, Path, dict[str, Any]],
) -> None:
    fp8, twin, _ = folders
    ours = dict(load(fp8, "bfloat16", None, CPU).model.named_parameters())
    theirs = dict(load(twin, "bfloat16", None, CPU).model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert answers(fp8, 1000, dtype="bfloat16") == answers(twin, 1000, dtype="bfloat16")


class Quantising(nn.Module):
    """A layer of transformers behind a quantised input, written out in float64."""

    def __init__(self, linear: nn.Linear, has_input_scale: bool) -> None:
        super().__init__()
        self.linear = linear
        self.has_input_scale = has_input_scale

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        scale = states.abs().amax(-1, keepdim=True) / 448
        if self.has_input_scale:
            scale = torch.full_like(scale, INPUT_SCALE)
        numbers = (states / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        weight = self.linear.weight.double()
        output = (numbers.double() * scale.double()) @ weight.t()
        return (output if self.linear.bias is None else output + self.linear.bias.double()).float()


def test_products_in_fp8_give_the_tokens_of_quantised_inputs(
    folders: tuple[Path, Path, dict[str, Any]],
) -> None:
    """The path that a GPU takes, with the same library function on the CPU."""
    fp8, twin, config = folders
    reference = load_reference(twin)
    is_fixed = config["config_groups"]["group_0"]["input_activations"] == FIXED
    for name, module in list(reference.named_modules()):
        if name.endswith("_proj"):
            reference.set_submodule(name, Quantising(module, is_fixed))
    expected = {name: reference_greedy(reference, prompt, NUM_TOKENS) for name, prompt in PROMPTS.items()}
    found = answers(fp8, 7, fp8_products="on", dtype="float32")
    assert found == expected
    assert found != answers(fp8, 7), "inputs are not quantised"


def test_each_weight_that_is_multiplied_as_fp8_takes_a_byte(
    folders: tuple[Path, Path, dict[str, Any]],
) -> None:
    fp8, _, config = folders
    loaded = load(fp8, "bfloat16", None, CPU, fp8_products="on")
    layers = [module for module in loaded.model.modules() if isinstance(module, Fp8Linear)]
    assert len(layers) == 7 * 2
    num_weights = sum(layer.in_features * layer.out_features for layer in layers)
    num_outputs = sum(layer.out_features for layer in layers)
    is_fixed = config["config_groups"]["group_0"]["input_activations"] == FIXED
    others = sum(
        parameter.numel()
        for name, parameter in loaded.model.named_parameters()
        if "_proj" not in name or name.endswith("bias")
    )
    held = sum(parameter.untyped_storage().nbytes() for parameter in loaded.model.parameters())
    assert held == num_weights + 4 * num_outputs + 4 * is_fixed * len(layers) + 2 * others
    converted = load(fp8, "bfloat16", None, CPU).model
    assert sum(each.nbytes for each in converted.parameters()) == 2 * (num_weights + others)


def test_workers_that_compute_differently_have_different_fingerprints(tmp_path: Path) -> None:
    """The weights are the same, so KV is handed over; it is not found in place of KV that a worker computed itself."""
    fp8 = make_fp8(make_checkpoint(tmp_path / "source"), tmp_path / "fp8", quantization())
    on, off = (load(fp8, "float32", None, CPU, fp8_products=each).info.fingerprint for each in ("on", "off"))
    assert on.partition("@")[0] == off.partition("@")[0]
    assert on != off


def test_ignored_layers_and_the_head_are_not_multiplied_as_fp8(tmp_path: Path) -> None:
    """The head is a matrix for other uses too; a layer whose sizes the product does not take is converted."""
    source = make_checkpoint(tmp_path / "source", intermediate_size=88)
    config = {**quantization(), "ignore": ["model.layers.0.self_attn.q_proj", "re:.*v_proj"]}
    whole = make_fp8(source, tmp_path / "whole", {**quantization(), "ignore": []}, only="proj.weight")
    loaded = load(whole, "float32", None, CPU, fp8_products="on").model
    names = {name for name, module in loaded.named_modules() if isinstance(module, Fp8Linear)}
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    head = make_fp8(source, tmp_path / "head", {**config, "ignore": []}, only="head.weight")
    loaded = load(head, "float32", None, CPU, fp8_products="on").model
    twin = load(make_twin(head, tmp_path / "twin"), "float32", None, CPU).model
    assert torch.equal(loaded.get_parameter("lm_head.weight"), twin.get_parameter("lm_head.weight"))
    part = make_fp8(source, tmp_path / "part", config, only="k_proj.weight")
    loaded = load(part, "float32", None, CPU, fp8_products="on").model
    names = {name for name, module in loaded.named_modules() if isinstance(module, Fp8Linear)}
    assert {name.rpartition(".")[2] for name in names} == {"k_proj"}


def test_weights_without_quantised_inputs_are_converted(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    fp8 = make_fp8(source, tmp_path / "fp8", quantization("channel", None))
    twin = make_twin(fp8, tmp_path / "twin")
    assert answers(fp8, 9) == answers(twin, 9)
    assert TOKEN["dynamic"]
