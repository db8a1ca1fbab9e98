"""Quantised checkpoints that are not understood, or damaged, are refused by name, by the loader and by the check alike."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from contract.errors import SettingError
from engine.models.loading import load
from engine.models.served import examine
from engine.quantisation.stored import READERS, read_scheme
from tests.checkpoints import make_checkpoint, make_foreign_checkpoint
from tests.quantised_checkpoints import VARIANTS, quantise

CPU = torch.device("cpu")
QUERY = "model.layers.0.self_attn.q_proj"


def changed(config: dict[str, Any], place: str, value: object) -> dict[str, Any]:
    """Return a quantisation with one other value; ``place`` has slashes."""
    found = copy.deepcopy(config)
    *path, last = place.split("/")
    at = found
    for name in path:
        at = at[name]
    at[last] = value
    return found


GROUP = "config_groups/group_0"


@pytest.mark.parametrize(
    ("name", "place", "value", "words"),
    [
        ("AWQ", "quant_method", "modelopt", "quant_method is 'modelopt'; only 'compressed-tensors' or"),
        ("AWQ", "quant_method", None, "quant_method is None; only"),
        ("AWQ", "version", "gemv", "version is 'gemv'; only 'gemm' is served"),
        ("AWQ", "bits", 3, "bits is 3; only 4 is served"),
        ("AWQ", "bits", True, "bits is True; only 4 is served"),
        ("AWQ", "group_size", 0, "group_size is 0; it must be a whole number above 0, or -1"),
        (
            "AWQ",
            "modules_to_not_convert",
            "lm_head",
            "modules_to_not_convert is 'lm_head'; it must be a list",
        ),
        ("GPTQ", "bits", 3, "bits is 3; only 4 or 8 is served"),
        ("GPTQ", "checkpoint_format", "marlin", "checkpoint_format is 'marlin'; only 'gptq' or 'gptq_v2'"),
        ("GPTQ", "pack_dtype", "int64", "pack_dtype is 'int64'; only 'int32' is served"),
        ("GPTQ", "is_marlin_format", True, "is_marlin_format is True; only False is served"),
        ("GPTQ", "desc_act", "yes", "desc_act is 'yes'; only True or False is served"),
        ("GPTQ", "dynamic", {"+:.*down.*": {"bits": 2}}, r"dynamic.\+:\.\*down\.\*.bits is 2; only 4 or 8"),
        ("GPTQ", "dynamic", [1], r"dynamic is \[1\]; it must be an object"),
        (
            "AutoRound as GPTQ",
            "packing_format",
            "auto_round:llm_compressor",
            "packing_format is 'auto_round:llm",
        ),
        ("AutoRound as GPTQ", "data_type", "mx_fp", "data_type is 'mx_fp'; only 'int' is served"),
        ("AutoRound as GPTQ", "act_bits", 8, "act_bits is 8; only 16 or 32 is served"),
        (
            "AutoRound as AWQ",
            "extra_config",
            {"a": {"bits": 8}},
            "extra_config.a.bits is 8; only 4 is served",
        ),
        ("FP8 blocks", "weight_block_size", [128], r"weight_block_size is \[128\]; it must be two whole"),
        ("FP8 blocks", "fmt", "e5m2", "fmt is 'e5m2'; only 'e4m3' is served"),
        ("FP8 blocks", "activation_scheme", "block", "activation_scheme is 'block'; only 'dynamic' or"),
        ("FP8 blocks", "scale_fmt", "e8m23", "scale_fmt is 'e8m23'; only 'ue8m0' or 'float' is served"),
        ("NF4", "bnb_4bit_quant_type", "af4", "bnb_4bit_quant_type is 'af4'; only 'nf4' or 'fp4' is served"),
        ("NF4", "bnb_4bit_quant_storage", "bfloat16", "bnb_4bit_quant_storage is 'bfloat16'; only 'uint8'"),
        ("NF4", "load_in_4bit", False, "load_in_4bit is False; only True is served"),
        ("int4 in groups", "format", "naive-quantized", "format is 'naive-quantized'; only 'pack-quantized'"),
        ("int4 in groups", f"{GROUP}/format", "int-quantized", "format is 'int-quantized'; only 'pack-quan"),
        ("int4 in groups", f"{GROUP}/weights/num_bits", 3, "weights.num_bits is 3; only 4 or 8 is served"),
        ("int4 in groups", f"{GROUP}/weights/group_size", None, "weights.group_size is None; it must be a"),
        ("int4 in groups", f"{GROUP}/weights/actorder", "mixed", "weights.actorder is 'mixed'; only 'group'"),
        ("int4 in groups", f"{GROUP}/weights/dynamic", True, "weights.dynamic is True; only False is served"),
        ("int8", f"{GROUP}/weights/num_bits", 4, "weights.num_bits is 4; only 8 is served"),
        ("int8", f"{GROUP}/input_activations/num_bits", 3, "input_activations.num_bits is 3; only 4 or 8"),
        ("NVFP4", f"{GROUP}/weights/strategy", "group", "weights.strategy is 'group'; only 'tensor_group'"),
        ("NVFP4", f"{GROUP}/weights/symmetric", False, "weights.symmetric is False; only True is served"),
    ],
)
def test_each_value_that_is_not_understood_is_named(name: str, place: str, value: object, words: str) -> None:
    with pytest.raises(SettingError, match=rf"config.json: quantization_config\S*{words}") as refused:
        read_scheme({"quantization_config": changed(VARIANTS[name].config, place, value)})
    assert "\n" not in refused.value.message


def test_a_quantisation_is_an_object() -> None:
    with pytest.raises(SettingError, match=r"quantization_config is \[1\]; it must be an object"):
        read_scheme({"quantization_config": [1]})
    methods = {variant.config["quant_method"] for variant in VARIANTS.values()}
    assert methods | {"mxfp4"} == set(READERS)


def stored_otherwise(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of layer QUERY."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for kind, tensor in changes.items():
        tensors.pop(f"{QUERY}.{kind}", None)
        if tensor is not None:
            tensors[f"{QUERY}.{kind}"] = tensor
    save_file(tensors, file)


Damage = tuple[str, dict[str, Tensor | None], str]
DAMAGES: list[Damage] = [
    ("int4 in groups", {"weight_scale": None}, r"tensor \S*q_proj.weight_scale is missing"),
    ("int4 in groups", {"weight_shape": None}, r"tensor \S*q_proj.weight_shape is missing"),
    ("int4 in groups", {"weight_packed": None}, r"tensor \S*q_proj.weight_scale belongs to no weight"),
    (
        "int4 in groups",
        {"weight_scale": torch.ones(64, 3)},
        r"weight_scale is \[64, 3\]; .* requires \[64, 2\]",
    ),
    ("int4 in groups", {"weight_scale": torch.ones(64, 2).int()}, "weight_scale is stored as I32"),
    ("int4 in groups", {"weight_shape": torch.tensor([64, 65])}, r"weight_packed is \[64, 8\]; .* \[64, 9\]"),
    ("int4 in groups", {"weight_shape": torch.tensor([64, 0])}, "both numbers must be above 0"),
    ("int4 in groups", {"weight_zero_point": torch.zeros(8, 2).int()}, "weight_zero_point belongs to no"),
    ("int4 in groups with zeros", {"weight_zero_point": None}, "weight_zero_point is missing"),
    ("int4 in ordered groups", {"weight_g_idx": None}, "weight_g_idx is missing"),
    (
        "int8",
        {"weight": torch.ones(64, 64).to(torch.float8_e4m3fn)},
        "weight is stored as F8_E4M3; .* requires I8",
    ),
    ("int8", {"weight_scale": None}, "weight_scale is missing"),
    ("int8", {"weight": torch.ones(64, 0).to(torch.int8)}, r"weight is \[64, 0\]; .* two dimensions above 0"),
    ("AWQ", {"qweight": torch.ones(0, 8).int()}, r"qweight is \[0, 8\]; .* two dimensions above 0"),
    (
        "FP8 blocks",
        {"weight": torch.ones(64).to(torch.float8_e4m3fn)},
        r"weight is \[64\]; .* two dimensions",
    ),
    ("two groups", {"weight_scale": torch.ones(64, 3)}, r"q_proj.weight_scale is \[64, 3\]|weight_packed is"),
    ("NVFP4", {"weight_global_scale": None}, "weight_global_scale is missing"),
    ("NVFP4", {"weight_scale": torch.ones(64, 4)}, "weight_scale is stored as F32; .* requires F8_E4M3"),
    ("FP8 blocks", {"weight_scale_inv": None}, "weight_scale_inv is missing"),
    (
        "FP8 blocks",
        {"weight_scale_inv": torch.ones(1, 1)},
        r"weight_scale_inv is \[1, 1\]; .* requires \[2, 2\]",
    ),
    ("FP8 blocks", {"weight": torch.ones(64, 64)}, "weight_scale_inv belongs to no weight"),
    (
        "FP8 blocks",
        {"weight": torch.ones(64, 64).to(torch.float8_e5m2)},
        "q_proj.weight is stored as F8_E5M2",
    ),
    ("GPTQ", {"scales": None}, "q_proj.scales is missing"),
    ("GPTQ", {"qzeros": None}, "q_proj.qzeros is missing"),
    ("GPTQ", {"qweight": None}, "q_proj.g_idx belongs to no weight"),
    ("GPTQ", {"g_idx": torch.zeros(63).int()}, r"g_idx is \[63\]; .* requires \[64\]"),
    ("GPTQ in order", {"g_idx": None}, "g_idx is missing"),
    ("AWQ", {"qzeros": torch.zeros(1, 8).int()}, r"qzeros is \[1, 8\]; .* requires \[2, 8\]"),
    ("AWQ", {"qweight": torch.zeros(64, 8)}, "qweight is stored as F32; .* requires I32"),
    ("NF4", {"weight.absmax": None}, "weight.absmax is missing"),
    ("NF4", {"weight.quant_map": torch.zeros(8)}, r"quant_map is \[8\]; .* requires \[16\]"),
    ("NF4 with nested scales", {"weight.nested_absmax": None}, "nested_absmax is missing"),
    ("NF4", {"weight.quant_state.bitsandbytes__nf4": torch.zeros(3).to(torch.uint8)}, "is no JSON"),
    ("NF4", {"weight.quant_state.bitsandbytes__nf4": torch.full((4096,), 91).to(torch.uint8)}, "is no JSON"),
    ("NF4", {"weight.quant_state.bitsandbytes__nf4": torch.zeros(4097).to(torch.uint8)}, "4096 at most"),
    ("LLM.int8", {"SCB": torch.ones(3)}, r"SCB is \[3\]; .* requires \[64\]"),
    ("LLM.int8", {"SCB": None}, "q_proj.weight is stored as I8, and quantization_config"),
    ("LLM.int8", {"weight_format": torch.ones((), dtype=torch.uint8)}, "weight_format is not 0"),
]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    DAMAGES,
    ids=[f"{name}, {' '.join(changes)}" for name, changes, _ in DAMAGES],
)
def test_a_damaged_layer_is_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, Tensor | None], words: str
) -> None:
    """Before a weight is read; the check gives the sentence of the loader."""
    variant = VARIANTS[name]
    source = make_checkpoint(tmp_path / "source", variant.family, num_hidden_layers=1, intermediate_size=32)
    quantised, _ = quantise(source, tmp_path / "quantised", variant)
    stored_otherwise(quantised, changes)
    sentences = []
    for read in (examine, lambda folder: load(folder, "auto", None, CPU)):
        with pytest.raises(SettingError, match=words) as refused:
            read(quantised)
        assert refused.value.param == "model"
        sentences.append(refused.value.message)
    assert sentences[0] == sentences[1]


def test_a_damaged_layer_of_a_model_of_transformers_is_refused_by_name(tmp_path: Path) -> None:
    source = make_foreign_checkpoint(tmp_path / "source", "olmo2")
    quantised, _ = quantise(source, tmp_path / "quantised", VARIANTS["FP8 blocks"])
    stored_otherwise(quantised, {"weight_scale_inv": None})
    for read in (examine, lambda folder: load(folder, "auto", None, CPU)):
        with pytest.raises(SettingError, match=r"q_proj\.weight_scale_inv is missing"):
            read(quantised)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("int4 in groups", "weight_scale", "weight_scale has values that are no scales"),
        ("FP8 blocks", "weight_scale_inv", "weight_scale_inv has values that are no scales"),
        ("GPTQ", "scales", "scales has values that are no scales"),
        ("GPTQ", "g_idx", r"g_idx names groups outside 0\.\.1"),
        ("NF4", "weight.absmax", "absmax has values that are no scales"),
        ("LLM.int8", "SCB", "SCB has values that are no scales"),
    ],
)
def test_values_that_cannot_be_scales_are_refused_when_they_are_read(
    tmp_path: Path, name: str, kind: str, words: str
) -> None:
    quantised, _ = quantise(make_checkpoint(tmp_path / "source"), tmp_path / "quantised", VARIANTS[name])
    stored = load_file(quantised / "model.safetensors")[f"{QUERY}.{kind}"]
    damaged = stored + 2 if kind == "g_idx" else torch.full_like(stored, float("nan"))
    stored_otherwise(quantised, {kind: damaged})
    with pytest.raises(SettingError, match=words):
        load(quantised, "auto", None, CPU)


def test_layers_that_must_not_be_quantised_and_are_contradict_the_file(tmp_path: Path) -> None:
    quantised, _ = quantise(make_checkpoint(tmp_path / "source"), tmp_path / "quantised", VARIANTS["AWQ"])
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = [QUERY]
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(SettingError, match=f"layer {QUERY} is quantised, and the list of layers"):
        examine(quantised)


def test_a_layer_that_two_groups_describe_is_ambiguous(tmp_path: Path) -> None:
    """Groups of 40 and of 48 are two of 64 inputs; they would give other numbers."""
    variant = VARIANTS["int4 in groups"]
    quantised, _ = quantise(make_checkpoint(tmp_path / "source"), tmp_path / "quantised", variant)
    config = json.loads((quantised / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = copy.deepcopy(groups["group_0"])
    groups["group_1"]["weights"]["group_size"] = 48
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(SettingError, match="is stored as several of the"):
        examine(quantised)


def test_layers_of_conv1d_would_be_read_the_wrong_way_round(tmp_path: Path) -> None:
    source = make_foreign_checkpoint(tmp_path / "source", "gpt2")
    quantised, _ = quantise(source, tmp_path / "quantised", VARIANTS["FP8 blocks"], only="c_proj.weight")
    for read in (examine, lambda folder: load(folder, "auto", None, CPU)):
        with pytest.raises(SettingError, match=r"inputs before outputs \(Conv1D\) are not served"):
            read(quantised)
