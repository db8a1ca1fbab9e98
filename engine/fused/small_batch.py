"""Launch products of small batches, which read their weights at the rate of memory, with the norm, gate or sum beside them.

Which kernel and tiles compute a product depends on its sizes and on the number of rows, so a row's result does not depend
on the other rows, except by their number.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.attention.triton_sizes import precision_of
from engine.compute.staging import overlap_of
from engine.fused import small_batch_kernels
from engine.fused.small_batch_tiles import Form, Tiles, tiles_of
from engine.models.linear import LinearOp, Product

_MOST_PARTS = 4096


@dataclass(frozen=True)
class Norm:
    """A root-mean-square norm; weight ``[size]``."""

    weight: Tensor
    eps: float


class SmallBatch:
    """Owns the counters of splits, which are zero between launches. dtypes: those that it multiplies."""

    def __init__(self, device: torch.device, dtypes: Collection[torch.dtype]) -> None:
        self._dtypes = dtypes
        self._arrived = torch.zeros(_MOST_PARTS, dtype=torch.int32, device=device)

    def tiles(self, product: LinearOp, states: Tensor, form: Form) -> Tiles | None:
        """Return the tiles for this product, None if it has none: it is then computed separately."""
        matrix = product.matrix
        if matrix is None or states.dtype not in self._dtypes:
            return None
        return tiles_of(form, len(states), *matrix.weight.shape)

    def multiply(
        self,
        product: Product,
        states: Tensor,
        tiles: Tiles,
        norm: Norm | None = None,
        *,
        is_gated: bool = False,
        output: Tensor | None = None,
    ) -> Tensor:
        """Multiply contiguous ``states [num_tokens, num_inputs]``, normed if ``norm`` is given; return ``output``.

        is_gated: the outputs are gate and up side by side; silu(gate) × up is returned.
        """
        if output is None:
            output = states.new_empty(len(states), len(product.weight) // (1 + is_gated))
        self._launch(product, states, tiles, output, norm, is_gated=is_gated)
        return output

    def add(self, product: Product, states: Tensor, tiles: Tiles, residual: Tensor) -> None:
        """Add the product of ``states`` to ``residual [num_tokens, num_outputs]`` in place."""
        self._launch(product, states, tiles, residual, None, has_residual=True)

    def _launch(
        self,
        product: Product,
        states: Tensor,
        tiles: Tiles,
        output: Tensor,
        norm: Norm | None,
        *,
        is_gated: bool = False,
        has_residual: bool = False,
    ) -> None:
        num_tokens, num_inputs = states.shape
        num_outputs = output.shape[1]
        num_parts = -(-num_outputs // tiles.outputs)
        given: dict[str, Any] = {
            "states": states,
            "weight": product.weight,
            "bias": states if product.bias is None else product.bias,
            "residual": output,
            "output": output,
            "num_inputs": num_inputs,
            "num_outputs": num_outputs,
            "outputs": tiles.outputs,
            "inputs": tiles.inputs,
            "has_bias": product.bias is not None,
            "has_residual": has_residual,
            "is_gated": is_gated,
            "num_warps": tiles.num_warps,
            **overlap_of(states.device),
        }
        if tiles.rows == 1:
            small_batch_kernels.row_kernel[num_parts,](
                **given,
                norm=states if norm is None else norm.weight,
                eps=0.0 if norm is None else norm.eps,
                has_norm=norm is not None,
            )
            return
        assert norm is None
        partial = output  # unused by one split
        if tiles.splits > 1:
            partial = output.new_empty(tiles.splits, num_tokens, num_outputs, dtype=torch.float32)
        small_batch_kernels.rows_kernel[num_parts, tiles.splits](
            **given,
            partial=partial,
            arrived=self._arrived,
            num_rows=num_tokens,
            share=tiles.share(num_inputs),
            rows=tiles.rows,
            splits=tiles.splits,
            stages=tiles.num_stages,
            precision=precision_of(states.dtype),
        )
