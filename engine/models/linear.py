"""A product with weights as every forward pass sees it, and the products whose weights are a matrix (ADR 0041)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.distributed.group import RankGroup


class LinearOp(ABC):
    """A product with weights, ``states @ weight.T + bias``, in whatever form the weights are kept.

    All linear layers of our decoder are LinearOps, its head included. What a checkpoint stores for a layer decides which
    one it is, and only ``engine.models.loading`` asks; the three forward passes use whatever the model has:

    - the modules (``engine.models.decoder``) call it;
    - the fused pass (``engine.fused``) joins it with those that read the same states (``joined``), once, and calls the
      result; for few rows it has kernels of its own, which multiply by ``matrix``, then ``total`` makes the result of that;
    - the C pass (``engine.kernels``) calls nothing: it packs ``matrix`` at load, and ``forget`` gives back the memory. It
      computes no model of which a layer has no matrix.

    So an implementation must have ``__call__`` and ``form``, and everything else makes it faster. This one runs in the
    modules and in the fused pass, and the C pass leaves its model to the modules::

        class Scaled(nn.Linear, LinearOp):
            form = "scaled numbers"

            def forward(self, states: Tensor) -> Tensor:
                return 2 * F.linear(states, self.weight, self.bias)


        model.set_submodule("model.layers.0.mlp.down_proj", Scaled(64, 32))

    With a matrix the C pass and the kernels of few rows compute it too::

            @property
            def matrix(self) -> Product:
                return Product(2 * self.weight.detach(), self.bias)

    Rows are computed independently of each other, up to rounding (law 6). form: the name of its numbers in messages.
    is_partial: ``matrix`` gives only this rank's part of the result.
    """

    form: str
    is_partial = False

    @abstractmethod
    def __call__(self, states: Tensor) -> Tensor:
        """Map ``[num_tokens, num_inputs]`` to ``[num_tokens, num_outputs]`` of the same dtype, equal on all ranks.

        If each rank has a range of the inputs, the states are that range. Raises RuntimeError for another width or dtype.
        """

    @property
    def matrix(self) -> "Product | None":
        """The product as a matrix of the states' dtype; None if it is another computation, which can only be called."""
        return None

    def total(self, own: Tensor) -> Tensor:
        """Return the result, of which ``own`` is the product of ``matrix``; if that is partial, ``own`` is overwritten."""
        return own

    def join(self, others: "Sequence[LinearOp]") -> "LinearOp | None":
        """Return one product of this one and ``others``, side by side; None if there is none. See ``joined``."""
        return None if others else self

    def forget(self) -> None:  # noqa: B027 - weights that only a module holds need no call
        """Release the weights, of which the caller has a copy. The product is not used afterwards."""


@dataclass(frozen=True)
class Product(LinearOp):
    """A matrix, ``[num_outputs, num_inputs]``, that belongs to no module."""

    weight: Tensor
    bias: Tensor | None
    form = "a matrix"

    def __call__(self, states: Tensor) -> Tensor:
        """See LinearOp."""
        return F.linear(states, self.weight, self.bias)

    @property
    def matrix(self) -> "Product":
        """See LinearOp."""
        return self


@dataclass(frozen=True)
class SummedProduct(LinearOp):
    """A product of which each rank has a range of inputs. part: this rank's, without the bias."""

    part: Product
    bias: Tensor | None
    group: RankGroup
    form = "a matrix"
    is_partial = True

    def __call__(self, states: Tensor) -> Tensor:
        """See LinearOp."""
        return self.total(self.part(states))

    @property
    def matrix(self) -> Product:
        """See LinearOp."""
        return self.part

    def total(self, own: Tensor) -> Tensor:
        """See LinearOp."""
        total = self.group.add_up(own)
        return total if self.bias is None else total + self.bias


@dataclass(frozen=True)
class SideBySide(LinearOp):
    """Products that read the same states and have no common form: computed one by one."""

    products: tuple[LinearOp, ...]
    form = "several forms"

    def __call__(self, states: Tensor) -> Tensor:
        """See LinearOp."""
        return torch.cat([product(states) for product in self.products], dim=-1)


def joined(*products: LinearOp) -> LinearOp:
    """Return what computes products of the same states at once, with their results side by side; also of one product.

    The products can still be used: weights that are multiplied together become views of one matrix, for good.
    """
    return products[0].join(products[1:]) or SideBySide(products)


class DenseLinear(nn.Linear, LinearOp):
    """A layer that is no more than its matrix. A subclass that computes something else overrides ``matrix``, too."""

    form = "a matrix"

    @property
    def matrix(self) -> Product | None:
        """See LinearOp."""
        return Product(self.weight.detach(), None if self.bias is None else self.bias.detach())

    def join(self, others: Sequence[LinearOp]) -> LinearOp | None:
        """See LinearOp. Layers with matrices become one matrix."""
        if not others:
            return self.matrix or self
        layers = [self, *others]
        parts = [layer.matrix for layer in layers if not layer.is_partial]
        matrices = [part for part in parts if part is not None]
        if len(matrices) < len(layers):
            return None
        biases = [part.bias for part in matrices if part.bias is not None]
        if len(biases) not in (0, len(layers)):
            return None
        weight = torch.cat([part.weight for part in matrices])
        bias = torch.cat(biases) if biases else None
        sizes = [len(part.weight) for part in matrices]
        for name, whole in (("weight", weight), ("bias", bias)):
            if whole is None:
                continue
            for layer, part, view in zip(layers, matrices, torch.split(whole, sizes), strict=True):
                own = getattr(layer, name, None)
                # Not of a layer whose matrix is computed from its weight: that would be computed once more.
                if isinstance(own, Tensor) and own.data_ptr() == getattr(part, name).data_ptr():
                    setattr(layer, name, nn.Parameter(view, requires_grad=False))
        return Product(weight, bias)

    def forget(self) -> None:
        """See LinearOp. The bias, which is small, stays."""
        self.register_parameter("weight", None)


class RowParallelLinear(DenseLinear):
    """A linear layer of which each rank has a range of inputs; the ranks' results are summed, then the bias is added."""

    is_partial = True

    def __init__(self, num_inputs: int, num_outputs: int, bias: bool, group: RankGroup) -> None:
        super().__init__(num_inputs, num_outputs, bias=bias)
        self.group = group

    def forward(self, states: Tensor) -> Tensor:
        """Map this rank's ``[num_tokens, num_inputs / size]`` to ``[num_tokens, num_outputs]``, equal on all ranks."""
        # The bias comes behind the sum: each rank would add it once more.
        output = self.group.add_up(F.linear(states, self.weight))
        return output if self.bias is None else output + self.bias

    @property
    def matrix(self) -> Product:
        """See LinearOp."""
        return Product(self.weight.detach(), None)

    def join(self, others: Sequence[LinearOp]) -> LinearOp | None:
        """See LinearOp."""
        bias = None if self.bias is None else self.bias.detach()
        return None if others else SummedProduct(self.matrix, bias, self.group)


def row_parallel(num_inputs: int, num_outputs: int, bias: bool, group: RankGroup) -> DenseLinear:
    """Make the layer behind a split one; ``num_inputs`` are this rank's."""
    if group.size == 1:
        return DenseLinear(num_inputs, num_outputs, bias=bias)
    return RowParallelLinear(num_inputs, num_outputs, bias, group)
