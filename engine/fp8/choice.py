"""Decide which layers of a model are multiplied as FP8 on a device, and prepare the model for their weights."""

import logging
from collections.abc import Collection

import torch
from torch import nn

from contract.errors import SettingError
from engine.distributed.group import RankGroup
from engine.fp8.linear import ALIGNMENT, Fp8Linear
from engine.fp8.scheme import Activations
from engine.fp8.stored import Fp8Checkpoint
from engine.models.sharding import RowParallelLinear

logger = logging.getLogger(__name__)

_HEAD = "lm_head"
_CAPABILITY = (8, 9)
"""Ada and Hopper, the first with matrix units for FP8."""


def why_converted(
    setting: str,
    dtype: torch.dtype,
    device: torch.device,
    checkpoint: Fp8Checkpoint,
    capability: tuple[int, int] | None = None,
) -> str | None:
    """Return why weights are converted to ``dtype``, None if they are multiplied as FP8.

    setting: ``ModelOptions.fp8_products``. capability: of a GPU; None: that of ``device``.
    Raises SettingError if it is "on" and that is not possible.
    """
    if setting == "off":
        return "fp8_products is off"
    if capability is None and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    reason = _why_impossible(dtype, capability, checkpoint)
    if reason is not None and setting == "on":
        raise SettingError(f"fp8_products is on, but {reason}; set it to auto", param="fp8_products")
    if reason is None and setting == "auto" and device.type == "cpu":
        return "on the CPU they are slower"
    return reason


def _why_impossible(
    dtype: torch.dtype, capability: tuple[int, int] | None, checkpoint: Fp8Checkpoint
) -> str | None:
    if checkpoint.scheme.activations is Activations.NONE:
        return "the checkpoint quantises weights only"
    if capability is None:
        return None
    if dtype != torch.bfloat16:
        return f"they give bfloat16, and the dtype is {dtype}".replace("torch.", "")
    if capability < _CAPABILITY:
        return f"the GPU's compute capability is {capability[0]}.{capability[1]}, below 8.9"
    return None


def prepare(model: nn.Module, checkpoint: Fp8Checkpoint, group: RankGroup) -> None:
    """Replace the layers of ``model`` that can multiply FP8 weights, so that it loads these from ``checkpoint``.

    The output head is converted: it is also used as a matrix.
    """
    has_input_scale = checkpoint.scheme.activations is Activations.FIXED
    checkpoint.multiplied = replace_linears(model, checkpoint.layers, has_input_scale, group)
    num_others = len(checkpoint.layers - checkpoint.multiplied)
    logger.info(
        "%d layers are multiplied as FP8, %d of FP8 are converted", len(checkpoint.multiplied), num_others
    )


def replace_linears(
    model: nn.Module, layers: Collection[str], has_input_scale: bool, group: RankGroup
) -> frozenset[str]:
    """Replace the linear layers of these names, where FP8 weights can be multiplied; return the names of those replaced."""
    found = {
        name: linear
        for name, linear in model.named_modules()
        if isinstance(linear, nn.Linear) and name in layers and _is_multiplied(name, linear)
    }
    for name, linear in found.items():
        summed = group if isinstance(linear, RowParallelLinear) else None
        model.set_submodule(name, Fp8Linear(linear, has_input_scale, summed))
    return frozenset(found)


def _is_multiplied(name: str, linear: nn.Linear) -> bool:
    sizes = (linear.in_features, linear.out_features)
    return name != _HEAD and all(size % ALIGNMENT == 0 for size in sizes)


def has_products(model: nn.Module) -> bool:
    """Return whether a model multiplies weights as FP8."""
    return any(isinstance(module, Fp8Linear) for module in model.modules())
