"""A packed linear layer equals the plain one, whatever its sizes and whoever computes beside."""

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels.binding import PANEL, CLinear, Kernels

SHAPES = [(32, 32), (264, 64), (31, 96), (1152, 896), (96, 4864)]


def packed(kernels: Kernels, threads: int, weight: Tensor) -> tuple[CLinear, Tensor]:
    outputs, inputs = weight.shape
    panels = torch.full((-(-outputs // PANEL) * PANEL * inputs,), torch.nan, dtype=torch.bfloat16)
    panels.zero_()
    kernels.pack(threads, weight, panels)
    return CLinear(panels.data_ptr(), None, inputs, outputs), panels


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def compute(kernels: Kernels, threads: int, layer: CLinear, states: Tensor) -> Tensor:
    """The layer's outputs, with something behind them that must stay."""
    room = torch.full((len(states) + 1, layer.outputs), 7.0)
    kernels.linear(threads, layer, states, room)
    assert (room[-1] == 7.0).all()
    assert torch.equal(room, room.to(torch.bfloat16).float())
    return room[:-1]


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 5, 12, 13, 40, 203])
def test_it_equals_the_plain_layer(
    kernels: Kernels, threads: int, outputs: int, inputs: int, num_rows: int
) -> None:
    weight, states = random(outputs, inputs), random(num_rows, inputs)
    layer, _panels = packed(kernels, threads, weight)
    exact = states.double() @ weight.double().T
    found = compute(kernels, threads, layer, states).double()
    assert (found - exact).norm() / exact.norm() < 2**-8


@pytest.mark.parametrize("inputs", [64, 4864])
def test_a_row_is_the_same_bit_by_bit_beside_any_others(kernels: Kernels, threads: int, inputs: int) -> None:
    layer, _panels = packed(kernels, threads, random(100, inputs))
    states = random(150, inputs)
    whole = compute(kernels, threads, layer, states)
    for start, num_rows in ((0, 1), (1, 2), (3, 7), (10, 12), (22, 13), (35, 100), (135, 15)):
        part = compute(kernels, threads, layer, states[start : start + num_rows])
        assert torch.equal(part, whole[start : start + num_rows]), (start, num_rows)


def test_threads_share_two_thousand_pieces_of_work(kernels: Kernels, threads: int) -> None:
    """Each piece is done once, before the next begins; also where threads fall asleep between them."""
    layer, _panels = packed(kernels, threads, random(640, 512))
    states = random(2, 512)
    expected = compute(kernels, threads, layer, states)
    room = torch.empty_like(expected)
    for number in range(2_000):
        room.fill_(torch.nan)
        kernels.linear(threads, layer, states, room)
        assert torch.equal(room, expected), number


@pytest.mark.parametrize("outputs", [1, 15, 31, 64, 1000, 1153])
def test_the_best_of_each_row(kernels: Kernels, threads: int, outputs: int) -> None:
    """The lowest number among equals, wherever they stand; none of a row with NaN or with nothing finite."""
    weight, states = random(outputs, 32), random(40, 32)
    weight[outputs // 2] = weight[-1]
    weight[:, 0], states[:, 0] = 0, 0
    layer, _panels = packed(kernels, threads, weight)
    states[3, 5], states[7] = torch.nan, torch.inf
    states[9] = weight[-1] * 8  # the last, and what equals it
    room, best = torch.empty(40, outputs), np.full(41, 77)
    kernels.linear(threads, layer, states, room, best[:40])
    assert best[40] == 77
    for row, (values, found) in enumerate(zip(room.numpy(), best.tolist(), strict=False)):
        highest = values.argmax()
        assert found == (highest if np.isfinite(values[highest]) else -1), row
    assert best[3] == best[7] == -1
    assert best[9] == outputs // 2
