"""Checks of products of small batches on any device against plain torch in float32. Only the checks import Triton."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.fused.small_batch_tiles import Form, Tiles
from tests.fused_cases import EPS, assert_near, random

ROW = Tiles(1, 4, 256, num_warps=4)
ROWS = Tiles(16, 16, 128, num_warps=4, num_stages=3)
SPLIT = Tiles(32, 16, 64, num_warps=4, num_stages=3, splits=4)


@dataclass(frozen=True)
class FewCase:
    """A small-batch product. num_outputs: after the gate."""

    form: Form
    tiles: Tiles
    num_tokens: int
    num_inputs: int
    num_outputs: int

    @property
    def has_norm(self) -> bool:
        """True if the kernel computes the norm: that of one row does."""
        return self.tiles.rows == 1 and self.form in (Form.NORMED, Form.GATED)


@dataclass(frozen=True)
class _Tensors:
    states: Tensor
    weight: Tensor
    bias: Tensor
    norm: Tensor
    residual: Tensor


def check_few_rows(case: FewCase, dtype: torch.dtype, device: torch.device, *, has_bias: bool) -> None:
    """Check the whole result; a second launch, which finds what the first left, gives the same bits."""
    tensors = _random_tensors(case, dtype)
    first, second = _found_twice(case, tensors, device, has_bias=has_bias)
    assert_near(first, _expected(case, tensors, has_bias=has_bias).to(dtype))
    assert torch.equal(first, second)


def check_rows_alone(case: FewCase, dtype: torch.dtype, device: torch.device) -> None:
    """Check that each row is computed alone as among others, bit by bit."""
    tensors = _random_tensors(case, dtype)
    found = _found_twice(case, tensors, device, has_bias=True)[0]
    for row in (0, case.num_tokens - 1):
        own = slice(row, row + 1)
        alone = _Tensors(
            tensors.states[own].clone(), tensors.weight, tensors.bias, tensors.norm, tensors.residual[own]
        )
        assert torch.equal(_found_twice(case, alone, device, has_bias=True)[0], found[own])


def _random_tensors(case: FewCase, dtype: torch.dtype) -> _Tensors:
    num_rows = case.num_outputs * (1 + (case.form is Form.GATED))
    return _Tensors(
        random(case.num_tokens, case.num_inputs, dtype=dtype, seed=1) * 3,
        (random(num_rows, case.num_inputs, seed=2) / case.num_inputs**0.5).to(dtype),
        random(num_rows, dtype=dtype, seed=3),
        random(case.num_inputs, dtype=dtype, seed=4),
        random(case.num_tokens, case.num_outputs, dtype=dtype, seed=5),
    )


def _expected(case: FewCase, tensors: _Tensors, *, has_bias: bool) -> Tensor:
    states = tensors.states.double()
    if case.has_norm:
        states = states / (states.square().mean(-1, keepdim=True) + EPS).sqrt() * tensors.norm.double()
    found = F.linear(states, tensors.weight.double(), tensors.bias.double() if has_bias else None)
    if case.form is Form.GATED:
        gate, up = found.chunk(2, dim=1)
        found = F.silu(gate) * up
    return found + tensors.residual.double() if case.form is Form.ADDED else found


def _found_twice(
    case: FewCase, tensors: _Tensors, device: torch.device, *, has_bias: bool
) -> tuple[Tensor, Tensor]:
    from engine.fused.small_batch import Norm, SmallBatch
    from engine.models.linear import Product

    small_batch = SmallBatch(device, [])
    product = Product(tensors.weight.to(device), tensors.bias.to(device) if has_bias else None)
    states = tensors.states.to(device)
    norm = Norm(tensors.norm.to(device), EPS) if case.has_norm else None

    def run() -> Tensor:
        if case.form is not Form.ADDED:
            return small_batch.multiply(product, states, case.tiles, norm, is_gated=case.form is Form.GATED)
        residual = tensors.residual.to(device, copy=True)
        small_batch.add(product, states, case.tiles, residual)
        return residual

    return run(), run()
