"""Matrix products of a decoder, of one layer or of several that read the same states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.distributed.group import RankGroup
from engine.fp8.linear import Fp8Linear, join
from engine.models.sharding import RowParallelLinear


@dataclass(frozen=True)
class Product:
    """A linear layer, ``[num_outputs, num_inputs]``."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, states: Tensor) -> Tensor:
        """Map ``[num_tokens, num_inputs]`` to ``[num_tokens, num_outputs]``."""
        return F.linear(states, self.weight, self.bias)


@dataclass(frozen=True)
class SummedProduct:
    """A linear layer of which each rank has a range of inputs. part: this rank's product, without the bias."""

    part: Product
    bias: Tensor | None
    group: RankGroup

    def __call__(self, states: Tensor) -> Tensor:
        """Map this rank's ``[num_tokens, num_inputs]`` to ``[num_tokens, num_outputs]``, equal on all ranks."""
        return self.total(self.part(states))

    def total(self, own: Tensor) -> Tensor:
        """Return the layer's result, of which ``own`` is this rank's part; ``own`` is overwritten."""
        total = self.group.add_up(own)
        return total if self.bias is None else total + self.bias


Linear = Callable[[Tensor], Tensor]
"""A Product, one that ranks add up, or a layer that does more, as one that multiplies FP8 weights."""


def product_of(linear: nn.Module) -> Linear:
    """Return the layer, as a Product or a SummedProduct if it is no more than that."""
    if type(linear) not in (nn.Linear, RowParallelLinear):
        return linear
    assert isinstance(linear, nn.Linear)
    weight = linear.weight.detach()
    bias = None if linear.bias is None else linear.bias.detach()
    if isinstance(linear, RowParallelLinear):
        return SummedProduct(Product(weight, None), bias, linear.group)
    return Product(weight, bias)


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
