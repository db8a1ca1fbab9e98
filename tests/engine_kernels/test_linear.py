"""A packed linear layer equals the plain one, for any sizes and any other rows in the batch."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels.binding import PANEL, Kernels
from engine.kernels.packed import Compressed, compress, num_panels

SHAPES = [(32, 32), (264, 64), (31, 96), (1152, 896), (96, 4864)]


def packed(kernels: Kernels, threads: int, weight: Tensor) -> Compressed:
    outputs, inputs = weight.shape
    panels = torch.zeros(num_panels(outputs) * PANEL * inputs, dtype=torch.bfloat16)
    kernels.pack(threads, weight, panels)
    return compress(kernels, threads, panels, outputs, inputs)


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def compute(kernels: Kernels, threads: int, compressed: Compressed, states: Tensor) -> Tensor:
    """Return the layer's outputs; the memory behind them must stay unchanged."""
    room = torch.full((len(states) + 1, compressed.layer.outputs), 7.0)
    kernels.linear(threads, compressed.layer, states, room)
    assert (room[-1] == 7.0).all()
    assert torch.equal(room, room.to(torch.bfloat16).float())
    return room[:-1]


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 5, 12, 13, 40, 203])
def test_it_equals_the_plain_layer(
    kernels: Kernels, threads: int, outputs: int, inputs: int, num_rows: int
) -> None:
    weight, states = random(outputs, inputs), random(num_rows, inputs)
    compressed = packed(kernels, threads, weight)
    exact = states.double() @ weight.double().T
    found = compute(kernels, threads, compressed, states).double()
    assert (found - exact).norm() / exact.norm() < 2**-8


@pytest.mark.parametrize("inputs", [64, 4864])
def test_a_row_is_bitwise_equal_beside_any_others(kernels: Kernels, threads: int, inputs: int) -> None:
    compressed = packed(kernels, threads, random(100, inputs))
    states = random(150, inputs)
    whole = compute(kernels, threads, compressed, states)
    for start, num_rows in ((0, 1), (1, 2), (3, 7), (10, 12), (22, 13), (35, 100), (135, 15)):
        part = compute(kernels, threads, compressed, states[start : start + num_rows])
        assert torch.equal(part, whole[start : start + num_rows]), (start, num_rows)


def common(*shape: int) -> Tensor:
    """Return numbers as in normal weights: nearly all have a code."""
    return random(*shape) * 0.02


def of_every_size(*shape: int) -> Tensor:
    """Return numbers with every exponent except those of zero, infinity and NaN: most have no code."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(0x80, 0x7F80, shape, generator=generator)
    signs = torch.randint(0, 2, shape, generator=generator) << 15
    return (bits | signs).to(torch.uint16).view(torch.bfloat16)


def with_a_few(*shape: int) -> Tensor:
    """Return normal weights with extreme numbers among them, adjacent and alone."""
    weight, strange = common(*shape), of_every_size(*shape)
    for place in ((0, 0), (0, 1), (0, 2), (1, 5), (31, 6), (-1, -1), (-1, -4), (20, slice(30, 40))):
        weight[place] = strange[place]
    return weight


@pytest.mark.parametrize("kind", [common, of_every_size, with_a_few, torch.zeros])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (70, 160), (40, 4160)])
def test_compression_is_lossless(
    kernels: Kernels, threads: int, kind: Callable[..., Tensor], outputs: int, inputs: int
) -> None:
    """A state that is 1 for one input returns that input's weights; with rows that share a tile and rows that do not."""
    weight = kind(outputs, inputs).to(torch.bfloat16)
    compressed = packed(kernels, threads, weight)
    states = torch.eye(inputs, dtype=torch.bfloat16)
    for start in range(0, inputs, 160):
        for num_rows in (1, 12, 13, 90):
            chosen = states[start : start + num_rows]
            found = compute(kernels, threads, compressed, chosen)
            assert torch.equal(found, weight[:, start : start + num_rows].T.float()), (start, num_rows)


def test_nearly_all_normal_weights_have_a_code(kernels: Kernels, threads: int) -> None:
    assert 0 < packed(kernels, threads, common(960, 960)).num_others < 960 * 960 / 5_000
    assert packed(kernels, threads, torch.zeros(64, 64, dtype=torch.bfloat16)).num_others == 0


def test_threads_share_two_thousand_pieces_of_work(kernels: Kernels, threads: int) -> None:
    """Each piece is done once, before the next begins, even if threads fall asleep in between."""
    compressed = packed(kernels, threads, random(640, 512))
    states = random(2, 512)
    expected = compute(kernels, threads, compressed, states)
    room = torch.empty_like(expected)
    for number in range(2_000):
        room.fill_(torch.nan)
        kernels.linear(threads, compressed.layer, states, room)
        assert torch.equal(room, expected), number


@pytest.mark.parametrize("outputs", [1, 15, 31, 64, 1000, 1153])
def test_the_index_of_the_best_output_of_each_row(kernels: Kernels, threads: int, outputs: int) -> None:
    """The lowest index among equals, at any place; none for a row with NaN or without a finite number."""
    weight, states = random(outputs, 32), random(40, 32)
    weight[outputs // 2] = weight[-1]
    weight[:, 0], states[:, 0] = 0, 0
    compressed = packed(kernels, threads, weight)
    states[3, 5], states[7] = torch.nan, torch.inf
    states[9] = weight[-1] * 8  # makes the last output the best, and those equal to it
    room, best = torch.empty(40, outputs), np.full(41, 77)
    kernels.linear(threads, compressed.layer, states, room, best[:40])
    assert best[40] == 77
    for row, (values, found) in enumerate(zip(room.numpy(), best.tolist(), strict=False)):
        highest = values.argmax()
        assert found == (highest if np.isfinite(values[highest]) else -1), row
    assert best[3] == best[7] == -1
    assert best[9] == outputs // 2
