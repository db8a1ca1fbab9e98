"""Quantisation in config.json: what is served, and what is refused by name before anything is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from contract.errors import SettingError
from engine.fp8.scheme import Activations, Fp8Scheme
from engine.models.loading import load
from engine.quantisation.stored import read_scheme
from tests.checkpoints import make_checkpoint, make_foreign_checkpoint
from tests.fp8_checkpoints import FIXED, TOKEN, make_fp8, quantization

CPU = torch.device("cpu")


def changed(place: str, value: object) -> dict[str, Any]:
    """A served quantisation with one other value; ``place`` has dots, "weights" and "input_activations" are the group's."""
    config = quantization()
    group = config["config_groups"]["group_0"]
    *path, last = place.split(".")
    at = config
    for name in path:
        at = group[name] if name in group else group if name == "group" else at[name]
    at[last] = value
    return config


def test_the_served_schemes() -> None:
    assert read_scheme({}) is None
    assert read_scheme({"quantization_config": None}) is None
    served = {
        Activations.TOKEN: quantization("channel", TOKEN),
        Activations.FIXED: quantization("tensor", FIXED),
        Activations.NONE: quantization("channel", None),
    }
    for activations, config in served.items():
        strategy = config["config_groups"]["group_0"]["weights"]["strategy"]
        expected = Fp8Scheme(strategy == "channel", activations, frozenset({"lm_head"}), has_kv_scales=False)
        assert read_scheme({"quantization_config": config}) == expected
    config = {**quantization(), "kv_cache_scheme": {"num_bits": 8}, "ignore": ["re:.*head", "lm_head"]}
    found = read_scheme({"quantization_config": config})
    assert isinstance(found, Fp8Scheme)
    assert found.has_kv_scales
    assert found.ignored == {"lm_head"}


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("quant_method", "hqq", r"quant_method is 'hqq'; only 'compressed-tensors' or 'fp8' or .* is served"),
        ("weight_block_size", [128, 128], r"weight_block_size is \[128, 128\]; only config_groups"),
        ("format", "pack-quantized", r"weights.type is 'float'; only 'int'"),
        ("format", "marlin-24", r"quantization_config.format is 'marlin-24'; only 'pack-quantized' or"),
        ("quantization_status", "frozen", r"quantization_status is 'frozen'"),
        ("config_groups", {}, r"config_groups is {}; it must have groups of layers"),
        ("config_groups", {"a": {}, "b": {}}, r"config_groups.a.weights is None; it must be an object"),
        ("config_groups", [1], r"it must have groups of layers by name"),
        ("config_groups", {"a": 5}, r"config_groups.a is 5; it must be an object"),
        ("group.format", "int-quantized", r"config_groups.group_0.format is 'int-quantized'"),
        ("group.weights", None, r"group_0.weights is None; it must be an object"),
        ("group.output_activations", TOKEN, r"output_activations is .*; quantised outputs"),
        ("weights.num_bits", 4, r"group_0.weights.num_bits is 4; only 8 is served"),
        ("weights.type", "int", r"weights.type is 'int'; only 'float'"),
        ("weights.strategy", "block", r"weights.block_structure is None; it must be two whole"),
        (
            "weights.block_structure",
            [128, 128],
            r"weights.block_structure is \[128, 128\]; only None is served",
        ),
        ("weights.strategy", "group", r"weights.group_size is None; it must be a whole number"),
        ("weights.strategy", "token", r"weights.strategy is 'token'; only 'tensor' or 'channel' or"),
        ("weights.group_size", 128, r"weights.group_size is 128"),
        ("weights.symmetric", False, r"weights.symmetric is False; only True"),
        ("weights.dynamic", True, r"weights.dynamic is True"),
        ("weights.actorder", "weight", r"weights.actorder is 'weight'"),
        ("input_activations.num_bits", 16, r"input_activations.num_bits is 16"),
        ("input_activations.type", "int", r"input_activations.type is 'int'"),
        ("input_activations.strategy", "group", r"input_activations.strategy is 'group'; only 'token'"),
        ("input_activations.dynamic", "local", r"input_activations.dynamic is 'local'"),
        ("group.input_activations", {**FIXED, "strategy": "token"}, r"strategy is 'token'; only 'tensor'"),
        (
            "sparsity_config",
            {"format": "sparse-24-bitmask"},
            r"sparsity_config.format is 'sparse-24-bitmask'",
        ),
        ("transform_config", {"config_groups": {"u": {}}}, r"transforms are not served"),
        ("ignore", "lm_head", r"ignore is 'lm_head'; it must be a list"),
    ],
)
def test_every_other_quantisation_is_refused_by_name(place: str, value: object, words: str) -> None:
    with pytest.raises(SettingError, match=words) as refused:
        read_scheme({"quantization_config": changed(place, value)})
    assert refused.value.param == "model"


def test_refusals_are_those_of_loading(tmp_path: Path) -> None:
    fp8 = make_fp8(make_checkpoint(tmp_path / "source"), tmp_path / "fp8", quantization())
    config = json.loads((fp8 / "config.json").read_text())
    config["quantization_config"] = changed("weights.num_bits", 4)
    (fp8 / "config.json").write_text(json.dumps(config))
    with pytest.raises(SettingError, match="num_bits is 4"):
        load(fp8, "auto", None, CPU)
    foreign = make_foreign_checkpoint(tmp_path / "foreign", "olmo2")
    config = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps({**config, "quantization_config": quantization()}))
    with pytest.raises(SettingError, match="no weight in the checkpoint has a scale"):
        load(foreign, "auto", None, CPU)


QUERY = "model.layers.0.self_attn.q_proj"


def stored_otherwise(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors of layer QUERY."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for kind, tensor in changes.items():
        tensors.pop(f"{QUERY}.{kind}", None)
        if tensor is not None:
            tensors[f"{QUERY}.{kind}"] = tensor
    save_file(tensors, file)


@pytest.mark.parametrize("way", ["on", "off"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight_scale": None}, r"tensor \S*q_proj.weight is stored as F8_E4M3 without a weight_scale"),
        ({"weight": torch.ones(64, 64)}, r"q_proj.weight has a weight_scale and is stored as F32"),
        ({"weight": torch.ones(64, 64).to(torch.float8_e5m2)}, r"is stored as F8_E5M2"),
        ({"weight_scale": torch.ones(1)}, r"q_proj.weight_scale is \[1\]; .* requires one for each output"),
        ({"weight_scale": torch.ones(4, 4)}, r"q_proj.weight_scale is \[4, 4\]"),
        ({"weight_scale": torch.full((64, 1), float("nan"))}, r"has values that are no scales"),
        ({"weight_scale": -torch.ones(64, 1)}, r"has values that are no scales"),
        ({"weight_scale": torch.ones(64, 1).to(torch.int32)}, r"q_proj.weight_scale is stored as I32"),
        ({"weight": torch.ones(64, 32).to(torch.float8_e4m3fn)}, r"q_proj.weight is \[64, 32\]; config.json"),
        (
            {"weight": torch.ones(64).to(torch.float8_e4m3fn)},
            r"is \[64\]; quantised weights have two dimensions",
        ),
        ({"weight_zero_point": torch.zeros(64, 1)}, r"has unexpected 1 tensors: \S*weight_zero_point"),
        ({"input_scale": torch.ones(1)}, r"has unexpected 1 tensors: \S*q_proj.input_scale"),
        (
            {"weight": None, "weight_scale": None, "weight_packed": torch.ones(64, 8)},
            r"misses 1 tensors: \S*q_proj.weight",
        ),
    ],
)
def test_what_is_stored_otherwise_is_refused_by_name(
    tmp_path: Path, way: str, changes: dict[str, torch.Tensor | None], words: str
) -> None:
    fp8 = make_fp8(make_checkpoint(tmp_path / "source"), tmp_path / "fp8", quantization())
    load(fp8, "auto", None, CPU, fp8_products=way)
    stored_otherwise(fp8, **changes)
    with pytest.raises(SettingError, match=words):
        load(fp8, "auto", None, CPU, fp8_products=way)


def test_inputs_are_never_divided_by_zero(tmp_path: Path) -> None:
    fp8 = make_fp8(make_checkpoint(tmp_path / "source"), tmp_path / "fp8", quantization("tensor", FIXED))
    stored_otherwise(fp8, weight_scale=torch.zeros(1))
    load(fp8, "auto", None, CPU, fp8_products="on")
    stored_otherwise(fp8, input_scale=torch.zeros(1))
    with pytest.raises(SettingError, match=r"q_proj.input_scale has values that are no scales"):
        load(fp8, "auto", None, CPU, fp8_products="on")


def test_a_fixed_scale_of_inputs_must_be_stored(tmp_path: Path) -> None:
    fp8 = make_fp8(make_checkpoint(tmp_path / "source"), tmp_path / "fp8", quantization("tensor", FIXED))
    stored_otherwise(fp8, input_scale=torch.ones(64, 1))
    with pytest.raises(SettingError, match=r"q_proj.input_scale is \[64, 1\]; .* requires one number"):
        load(fp8, "auto", None, CPU)
    stored_otherwise(fp8, input_scale=None)
    with pytest.raises(SettingError, match=r"layer \S*q_proj has no input_scale"):
        load(fp8, "auto", None, CPU)


def test_a_scale_of_a_layer_may_be_a_number_or_a_list_of_one(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    fp8 = make_fp8(source, tmp_path / "fp8", quantization("tensor", FIXED))
    found = []
    for shape in ([], [1]):
        stored_otherwise(fp8, weight_scale=torch.full(shape, 0.5), input_scale=torch.full(shape, 0.25))
        loaded = [load(fp8, "float32", None, CPU, fp8_products=way).model for way in ("on", "off")]
        found += [model.get_submodule(QUERY).state_dict() for model in loaded]
    multiplied, converted = found[:2]
    assert multiplied["weight_scale"].tolist() == [[0.5]] * 64
    assert multiplied["input_scale"].tolist() == [0.25]
    assert torch.equal(converted["weight"], multiplied["weight"].float() * 0.5)
    assert all(
        torch.equal(found[2 + index][name], found[index][name]) for index in (0, 1) for name in found[index]
    )


def test_ignored_layers_may_not_have_scales(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    fp8 = make_fp8(source, tmp_path / "fp8", {**quantization(), "ignore": ["lm_head", QUERY]})
    with pytest.raises(SettingError, match=rf"layer {QUERY} has a weight_scale, and .*ignore names it"):
        load(fp8, "auto", None, CPU)
    plain = make_fp8(source, tmp_path / "plain", quantization(), only="nothing")
    with pytest.raises(SettingError, match="no weight in the checkpoint has a scale"):
        load(plain, "auto", None, CPU)


def test_numbers_of_few_bits_are_never_read_without_their_description(tmp_path: Path) -> None:
    """Without a quantization_config an integer or FP8 tensor of the right shape would be cast, to garbage."""
    source = make_checkpoint(tmp_path / "source")
    for name, dtype in (("I8", torch.int8), ("F8_E4M3", torch.float8_e4m3fn)):
        stored_otherwise(source, weight=torch.ones(64, 64).to(dtype))
        with pytest.raises(
            SettingError, match=rf"q_proj.weight is stored as {name}, and config.json describes no"
        ):
            load(source, "auto", None, CPU)


def test_scales_of_an_fp8_kv_cache_are_not_needed(tmp_path: Path) -> None:
    """KV stays in the dtype of the computation."""
    config = {**quantization(), "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    fp8 = make_fp8(make_checkpoint(tmp_path / "source"), tmp_path / "fp8", config)
    expected = load(fp8, "auto", None, CPU).model.state_dict()
    file = fp8 / "model.safetensors"
    scales = {f"model.layers.{n}.self_attn.{each}_scale": torch.ones(1) for n in range(2) for each in "kv"}
    save_file({**load_file(file), **scales}, file)
    found = load(fp8, "auto", None, CPU).model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_on_is_refused_where_it_is_impossible(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    fp8 = make_fp8(source, tmp_path / "fp8", quantization("channel", None))
    with pytest.raises(SettingError, match="fp8_products is on, but the checkpoint quantises weights only"):
        load(fp8, "auto", None, CPU, fp8_products="on")
