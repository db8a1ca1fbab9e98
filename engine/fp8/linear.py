"""Linear layers whose weights are FP8 (e4m3) and are multiplied as such: one byte a weight, twice the products a second.

Which layers of a model are such ones is decided by the device and by the checkpoint; the others are converted.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from contract.errors import SettingError
from engine.distributed.group import RankGroup
from engine.fp8.scheme import Activations
from engine.fp8.stored import Fp8Checkpoint
from engine.models.linear import DenseLinear, LinearOp

logger = logging.getLogger(__name__)

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
SMALLEST_SCALE = 1e-12
"""Rows of zeros have a scale too."""
ALIGNMENT = 16
"""Numbers of inputs and outputs that ``torch._scaled_mm`` takes are multiples of this."""
_HEAD = "lm_head"
# Ada and Hopper, the first with matrix units for FP8.
_CAPABILITY = (8, 9)
_HAS_TRITON = find_spec("triton") is not None


class Fp8Linear(nn.Linear, LinearOp):
    """A linear layer with a scale for each output, ``weight_scale [num_outputs, 1]``.

    Inputs are quantised by a scale of each token, or by the stored ``input_scale [1]``, which is the same for all.
    group: the ranks whose results are summed, if each has a range of inputs. Made on the meta device, then loaded.
    """

    form = "FP8"

    def __init__(self, linear: nn.Linear, has_input_scale: bool, group: RankGroup | None) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = _frozen(torch.empty_like(linear.weight, dtype=FP8))
        self.weight_scale = _frozen(torch.empty(linear.out_features, 1, device="meta"))
        self.register_parameter(
            "input_scale", _frozen(torch.empty(1, device="meta")) if has_input_scale else None
        )
        self.register_parameter("bias", linear.bias)
        self._group = group

    def forward(self, states: Tensor) -> Tensor:
        """Map ``[num_tokens, num_inputs]`` to ``[num_tokens, num_outputs]`` of the same dtype, equal on all ranks."""
        output = product(states, self.weight, self.weight_scale, self.stored_input_scale)
        if self._group is not None:
            output = self._group.add_up(output)
        return output if self.bias is None else output + self.bias

    @property
    def stored_input_scale(self) -> Tensor | None:
        """The scale ``[1]`` of all inputs, None if each token has its own."""
        return self.input_scale if isinstance(self.input_scale, Tensor) else None

    def join(self, others: Sequence[LinearOp]) -> LinearOp | None:
        """See LinearOp. Layers of FP8 become one product if one scale quantises the inputs of all."""
        layers = [self, *(layer for layer in others if isinstance(layer, Fp8Linear))]
        first, *further = (layer.stored_input_scale for layer in layers)
        # Inputs are quantised once for all: with a stored scale, that must be the same.
        is_one_scale = first is None or all(
            scale is not None and torch.equal(scale, first) for scale in further
        )
        if not others:
            return self
        if len(layers) <= len(others) or not is_one_scale:
            return None
        sizes = [layer.out_features for layer in layers]
        weight = torch.cat([layer.weight.view(torch.uint8) for layer in layers]).view(FP8)
        scale = torch.cat([layer.weight_scale for layer in layers])
        for layer, own_weight, own_scale in zip(
            layers, torch.split(weight, sizes), torch.split(scale, sizes), strict=True
        ):
            layer.weight = _frozen(own_weight)
            layer.weight_scale = _frozen(own_scale)
        bias = None if self.bias is None else torch.cat([layer.bias for layer in layers])
        return Fp8Product(weight, scale, first, bias)


@dataclass(frozen=True)
class Fp8Product(LinearOp):
    """Joined layers: see Fp8Linear."""

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None
    bias: Tensor | None
    form = "FP8"

    def __call__(self, states: Tensor) -> Tensor:
        """See LinearOp."""
        output = product(states, self.weight, self.weight_scale, self.input_scale)
        return output if self.bias is None else output + self.bias


def product(states: Tensor, weight: Tensor, weight_scale: Tensor, input_scale: Tensor | None) -> Tensor:
    """Multiply ``states [num_tokens, num_inputs]``, quantised first. No row of the result depends on other rows."""
    if states.is_cuda and _HAS_TRITON:
        from engine.fused.rows import quantised

        numbers, scale = quantised(states, input_scale, LARGEST, SMALLEST_SCALE)
    elif input_scale is None:
        numbers, scale = by_token(states)
    else:
        numbers, scale = by_scale(states, input_scale)
    return multiply(numbers, scale, weight, weight_scale, states.dtype)


def multiply(
    numbers: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Multiply FP8 numbers ``[num_tokens, num_inputs]`` with a scale for each row by a weight; see Fp8Linear."""
    if numbers.is_cuda:
        result: Tensor = torch._scaled_mm(
            numbers, weight.t(), scale_a=scale, scale_b=weight_scale.t(), out_dtype=dtype
        )
        return result
    one = torch.ones(())  # torch 2.11 has one scale for all rows on the CPU
    sums = torch._scaled_mm(numbers, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    return (sums * scale * weight_scale.t()).to(dtype)


def by_token(states: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP8 numbers and the scale of each row, ``[num_tokens, 1]``, by which the largest one is LARGEST."""
    wide = states.float()
    scale = (wide.abs().amax(-1, keepdim=True) / LARGEST).clamp_min(SMALLEST_SCALE)
    return _rounded(wide / scale), scale


def by_scale(states: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP8 numbers by a given scale ``[1]``, and that scale for each row; larger numbers are cut."""
    return _rounded(states.float() / scale), scale.expand(len(states), 1).contiguous()


def _rounded(numbers: Tensor) -> Tensor:
    return numbers.clamp(-LARGEST, LARGEST).to(FP8)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def why_dequantized(
    setting: str,
    dtype: torch.dtype,
    device: torch.device,
    checkpoint: Fp8Checkpoint,
    capability: tuple[int, int] | None = None,
) -> str | None:
    """Return why weights are dequantized to ``dtype`` at load, None if they use FP8 matmul.

    setting: ``ModelOptions.fp8_products``. capability: of a GPU; None: that of ``device``.
    Raises SettingError if it is "on" and that is not possible.
    """
    if setting == "off":
        return "fp8_products is off"
    if capability is None and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    reason = None
    if checkpoint.scheme.activations is Activations.NONE:
        reason = "the checkpoint quantises weights only"
    elif capability is not None and dtype != torch.bfloat16:
        reason = f"they give bfloat16, and the dtype is {dtype}".replace("torch.", "")
    elif capability is not None and capability < _CAPABILITY:
        reason = f"the GPU's compute capability is {capability[0]}.{capability[1]}, below 8.9"
    if reason is not None and setting == "on":
        raise SettingError(f"fp8_products is on, but {reason}; set it to auto", param="fp8_products")
    if reason is None and setting == "auto" and device.type == "cpu":
        return "on the CPU they are slower"
    return reason


def prepare(model: nn.Module, checkpoint: Fp8Checkpoint, group: RankGroup) -> None:
    """Replace the layers of ``model`` that can multiply FP8 weights, so that it loads these from ``checkpoint``.

    The output head is converted: it is also used as a matrix.
    """
    has_input_scale = checkpoint.scheme.activations is Activations.FIXED
    checkpoint.multiplied = replace_linears(model, checkpoint.layers, has_input_scale, group)
    num_others = len(checkpoint.layers - checkpoint.multiplied)
    logger.info(
        "FP8: %d layers use FP8 matmul, %d are dequantized at load", len(checkpoint.multiplied), num_others
    )


def replace_linears(
    model: nn.Module, layers: Collection[str], has_input_scale: bool, group: RankGroup
) -> frozenset[str]:
    """Replace the linear layers of these names, where FP8 weights can be multiplied; return the names of those replaced."""
    found = {
        name: linear
        for name, linear in model.named_modules()
        # The head is used as a matrix too, and the kernels take sizes of whole tiles only.
        if isinstance(linear, DenseLinear)
        and name in layers
        and name != _HEAD
        and not (linear.in_features % ALIGNMENT or linear.out_features % ALIGNMENT)
    }
    for name, linear in found.items():
        summed = group if linear.is_partial else None
        model.set_submodule(name, Fp8Linear(linear, has_input_scale, summed))
    return frozenset(found)
