"""Linear layers whose weights are FP8 (e4m3) and are multiplied as such: one byte a weight, twice the products a second."""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from engine.distributed.group import RankGroup

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
SMALLEST_SCALE = 1e-12
"""Rows of zeros have a scale too."""
ALIGNMENT = 16
"""Numbers of inputs and outputs that ``torch._scaled_mm`` takes are multiples of this."""


class Fp8Linear(nn.Linear):
    """A linear layer with a scale for each output, ``weight_scale [num_outputs, 1]``.

    Inputs are quantised by a scale of each token, or by the stored ``input_scale [1]``, which is the same for all.
    group: the ranks whose results are summed, if each has a range of inputs. Made on the meta device, then loaded.
    """

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


def product(states: Tensor, weight: Tensor, weight_scale: Tensor, input_scale: Tensor | None) -> Tensor:
    """Multiply ``states [num_tokens, num_inputs]``, quantised first. No row of the result depends on other rows."""
    numbers, scale = _quantised(states, input_scale)
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


def _quantised(states: Tensor, input_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    if states.is_cuda and _has_triton():
        from engine.fp8.rows import quantised

        return quantised(states, input_scale, LARGEST, SMALLEST_SCALE)
    return by_token(states) if input_scale is None else by_scale(states, input_scale)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


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


def join(linears: Sequence[nn.Linear]) -> Callable[[Tensor], Tensor]:
    """Return the results of layers that read the same states, side by side: one product if all are FP8 with equal scales.

    Their weights then become views of one matrix, for good.
    """
    layers = [linear for linear in linears if isinstance(linear, Fp8Linear)]
    if len(layers) < len(linears) or not _have_one_input_scale(layers):
        return lambda states: torch.cat([linear(states) for linear in linears], dim=-1)
    sizes = [layer.out_features for layer in layers]
    weight = torch.cat([layer.weight.view(torch.uint8) for layer in layers]).view(FP8)
    scale = torch.cat([layer.weight_scale for layer in layers])
    for layer, own_weight, own_scale in zip(
        layers, torch.split(weight, sizes), torch.split(scale, sizes), strict=True
    ):
        layer.weight = _frozen(own_weight)
        layer.weight_scale = _frozen(own_scale)
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    input_scale = layers[0].stored_input_scale

    def joined(states: Tensor) -> Tensor:
        output = product(states, weight, scale, input_scale)
        return output if bias is None else output + bias

    return joined


def _have_one_input_scale(layers: Sequence[Fp8Linear]) -> bool:
    first = layers[0].stored_input_scale
    others = [layer.stored_input_scale for layer in layers[1:]]
    if first is None:
        return True
    return all(other is not None and torch.equal(other, first) for other in others)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
