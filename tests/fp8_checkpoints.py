"""Tiny checkpoints with FP8 weights as compressed-tensors stores them, and their twins with converted weights."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_FP8 = torch.float8_e4m3fn
_LARGEST = 448.0
TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
FIXED = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
INPUT_SCALE = 0.03


def quantization(strategy: str = "channel", inputs: dict[str, Any] | None = TOKEN) -> dict[str, Any]:
    """Return the quantization_config of llm-compressor's FP8 recipes."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": {**weights, "block_structure": None, "group_size": None, "actorder": None},
        "input_activations": copy.deepcopy(inputs),
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def make_fp8(source: Path, folder: Path, config: dict[str, Any], *, only: str = "proj.weight") -> Path:
    """Write the checkpoint ``source``, of one file, with weights in FP8 whose names end with ``only``; return ``folder``."""
    group = config["config_groups"]["group_0"]
    per_channel = group["weights"]["strategy"] == "channel"
    has_input_scale = group["input_activations"] is not None and not group["input_activations"]["dynamic"]
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(only):
            tensors[name] = tensor
            continue
        wide = tensor.float()
        most = wide.abs().amax(-1, keepdim=True) if per_channel else wide.abs().amax().view(1)
        scale = (most / _LARGEST).bfloat16()
        tensors[name] = (wide / scale.float()).clamp(-_LARGEST, _LARGEST).to(_FP8)
        tensors[f"{name}_scale"] = scale
        if has_input_scale:
            tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor([INPUT_SCALE])
    return _write(source, folder, tensors, {"quantization_config": config})


def make_twin(source: Path, folder: Path) -> Path:
    """Write the FP8 checkpoint ``source`` with each weight converted to float32, and without its configuration."""
    stored = load_file(source / "model.safetensors")
    tensors = {
        name: tensor.float() * stored[f"{name}_scale"].float() if tensor.dtype == _FP8 else tensor.float()
        for name, tensor in stored.items()
        if not name.endswith("_scale")
    }
    return _write(source, folder, tensors, {"quantization_config": None, "dtype": "float32"})


def _write(source: Path, folder: Path, tensors: dict[str, Tensor], fields: dict[str, Any]) -> Path:
    shutil.copytree(source, folder)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {**json.loads((source / "config.json").read_text()), **fields}
    written = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(written, indent=1))
    return folder
