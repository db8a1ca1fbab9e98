"""Tiny checkpoints with quantised weights, and their twins of plain weights, whose values the packers chose."""

import copy
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.weight_packers import (
    BLOCK,
    SIZE,
    Packer,
    awq,
    eight_bits,
    four_bits,
    fp8_blocks,
    gptq,
    mixed,
    nvfp4,
    packed_integers,
    plain_integers,
)


@dataclass(frozen=True)
class Variant:
    """A quantised checkpoint. pack: of one weight ``[num_outputs, num_inputs]``, with its name. config: of config.json."""

    config: dict[str, Any]
    pack: Packer
    family: str = "llama"


def of_group(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a group of compressed-tensors' configuration."""
    return {
        "targets": ["Linear"],
        "format": form,
        "weights": {
            "dynamic": False,
            "symmetric": True,
            "block_structure": None,
            "group_size": None,
            **weights,
        },
        "input_activations": inputs,
        "output_activations": None,
    }


def compressed(form: str, *groups: dict[str, Any]) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups)},
        "ignore": ["lm_head", "re:.*head.*"],
    }


def _integers(
    num_bits: int, strategy: str, *, symmetric: bool = True, actorder: str | None = None
) -> dict[str, Any]:
    size = SIZE if strategy == "group" else None
    weights = {"num_bits": num_bits, "type": "int", "strategy": strategy, "group_size": size}
    return of_group("pack-quantized", {**weights, "symmetric": symmetric, "actorder": actorder})


_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
_INT8_INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
_FP8_BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": list(BLOCK)}
_FP8_INPUTS = {
    "num_bits": 8,
    "type": "float",
    "strategy": "group",
    "group_size": 128,
    "dynamic": True,
    "symmetric": True,
}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_NVFP4_INPUTS = {**_NVFP4, "dynamic": "local", "symmetric": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": SIZE, "desc_act": False, "sym": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": SIZE, "version": "gemm", "zero_point": True}
_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": SIZE, "sym": False, "data_type": "int"}
_BNB = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
}
_FP8_METHOD = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}

VARIANTS: dict[str, Variant] = {
    "int4 in groups": Variant(
        compressed("pack-quantized", _integers(4, "group")), packed_integers(4, "group"), "qwen3"
    ),
    "int4 in groups with zeros": Variant(
        compressed("pack-quantized", _integers(4, "group", symmetric=False)),
        packed_integers(4, "group", has_zeros=True),
    ),
    "int4 in ordered groups": Variant(
        compressed("pack-quantized", _integers(4, "group", actorder="group")),
        packed_integers(4, "group", has_order=True),
        "mistral",
    ),
    "int4 by channel with zeros": Variant(
        compressed("pack-quantized", _integers(4, "channel", symmetric=False)),
        packed_integers(4, "channel", has_zeros=True),
    ),
    "int8 by tensor with zeros": Variant(
        compressed("pack-quantized", _integers(8, "tensor", symmetric=False)),
        packed_integers(8, "tensor", has_zeros=True),
    ),
    "int8": Variant(
        compressed("int-quantized", of_group("int-quantized", _INT8, _INT8_INPUTS)), plain_integers(), "qwen2"
    ),
    "int8 with zeros": Variant(
        compressed("int-quantized", of_group("int-quantized", {**_INT8, "symmetric": False}, _INT8_INPUTS)),
        plain_integers(has_zeros=True),
    ),
    "two groups": Variant(
        compressed("pack-quantized", _integers(8, "channel"), _integers(4, "group", symmetric=False)), mixed
    ),
    "FP8 blocks of compressed-tensors": Variant(
        compressed("float-quantized", of_group("float-quantized", _FP8_BLOCK, _FP8_INPUTS)),
        fp8_blocks("weight_scale"),
    ),
    "NVFP4": Variant(
        compressed("nvfp4-pack-quantized", of_group("nvfp4-pack-quantized", _NVFP4, _NVFP4_INPUTS)), nvfp4
    ),
    "FP8 blocks": Variant(
        {**_FP8_METHOD, "weight_block_size": list(BLOCK), "modules_to_not_convert": ["lm_head"]},
        fp8_blocks("weight_scale_inv"),
        "qwen3",
    ),
    "FP8 by tensor": Variant(_FP8_METHOD, fp8_blocks("weight_scale_inv", None)),
    "GPTQ": Variant(_GPTQ, gptq(4), "qwen2"),
    "GPTQ in 8 bits": Variant({**_GPTQ, "bits": 8}, gptq(8)),
    "GPTQ in order": Variant({**_GPTQ, "desc_act": True}, gptq(4, has_order=True)),
    "GPTQ v2": Variant({**_GPTQ, "checkpoint_format": "gptq_v2"}, gptq(4, is_second=True)),
    "AWQ": Variant(_AWQ, awq, "qwen2"),
    "AutoRound as GPTQ": Variant({**_ROUND, "packing_format": "auto_round:auto_gptq"}, gptq(4)),
    "AutoRound as AWQ": Variant({**_ROUND, "packing_format": "auto_round:auto_awq"}, awq),
    "NF4": Variant(_BNB, four_bits("nf4", is_nested=False)),
    "NF4 with nested scales": Variant(
        {**_BNB, "bnb_4bit_use_double_quant": True}, four_bits("nf4", is_nested=True), "qwen3"
    ),
    "FP4": Variant({**_BNB, "bnb_4bit_quant_type": "fp4"}, four_bits("fp4", is_nested=False)),
    "LLM.int8": Variant({**_BNB, "load_in_4bit": False, "load_in_8bit": True}, eight_bits),
}


def quantise(
    source: Path, folder: Path, variant: Variant, *, only: str | tuple[str, ...] = "proj.weight"
) -> tuple[Path, Path]:
    """Write the checkpoint ``source``, of one file, with the weights quantised whose names end with ``only``.

    Returns the folder of that, and of its twin: the same values in float32, without a quantisation.
    """
    tensors: dict[str, Tensor] = {}
    twin: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        twin[name] = tensor.float()
        if not name.endswith(only):
            tensors.setdefault(name, tensor)
            continue
        stored, twin[name] = variant.pack(name, tensor)
        layer = name.removesuffix("weight")
        for kind, part in stored.items():
            if kind != "bias" or f"{layer}bias" not in tensors:
                tensors[f"{layer}{kind}"] = part
    # A bias of the model replaces the zeros that a packer has written.
    tensors |= {name: tensor for name, tensor in twin.items() if name.endswith("bias")}
    fields = {"quantization_config": copy.deepcopy(variant.config)}
    return _write(source, folder, tensors, fields), _write(
        source, Path(f"{folder}-twin"), twin, {"dtype": "float32"}
    )


def _write(source: Path, folder: Path, tensors: dict[str, Tensor], fields: dict[str, Any]) -> Path:
    shutil.copytree(source, folder)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {**json.loads((source / "config.json").read_text()), **fields}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
