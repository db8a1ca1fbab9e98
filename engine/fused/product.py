"""Matrix products of a decoder, of one layer or of several that read the same states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.fp8.linear import Fp8Linear, join


@dataclass(frozen=True)
class Product:
    """A linear layer, ``[num_outputs, num_inputs]``."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, states: Tensor) -> Tensor:
        """Map ``[num_tokens, num_inputs]`` to ``[num_tokens, num_outputs]``."""
        return F.linear(states, self.weight, self.bias)


Linear = Callable[[Tensor], Tensor]
"""A Product, or a layer that does more: that multiplies FP8 weights, or sums the results of several ranks."""


def product_of(linear: nn.Module) -> Linear:
    """Return the layer, as a Product if it is no more than that."""
    if type(linear) is nn.Linear:
        return Product(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())
    return linear


def joined(*linears: nn.Linear) -> Linear:
    """Replace layers that read the same states by one product; their weights and biases become views of its."""
    if any(isinstance(linear, Fp8Linear) for linear in linears):
        return join(linears)
    return Product(_joined(linears, "weight"), None if linears[0].bias is None else _joined(linears, "bias"))


def _joined(linears: Sequence[nn.Linear], name: str) -> Tensor:
    whole = torch.cat([getattr(linear, name) for linear in linears]).detach()
    parts = torch.split(whole, [linear.out_features for linear in linears])
    for linear, part in zip(linears, parts, strict=True):
        linear.register_parameter(name, nn.Parameter(part, requires_grad=False))
    return whole
