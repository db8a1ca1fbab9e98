"""Linear layers, packed and compressed for the kernels one behind the other in one piece of memory."""

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.kernels.binding import PANEL, CLinear, Kernels
from engine.kernels.compressed import compress, num_panels, weight_bytes
from engine.models.load_progress import LoadProgress

_LINE = 64
"""Bytes of a cache line."""


class LayerPacker:
    """Owns the memory of packed layers, and all tensors whose addresses the kernels use.

    The memory is ``num_bytes`` of private huge pages, where the system has them. pool: the kernels' threads. num_others:
    weights so far that have no code of 12 bits.
    """

    def __init__(self, kernels: Kernels, pool: int, num_bytes: int, progress: LoadProgress) -> None:
        self.kept: list[Tensor] = []
        self.num_others = 0
        self._kernels = kernels
        self._pool = pool
        self._progress = progress
        self._free = _pages(num_bytes)
        self._panels = torch.empty(0, dtype=torch.bfloat16)
        """One layer before it is compressed."""

    def linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> CLinear:
        """Pack layers into one that computes what they do, one behind the other."""
        outputs = sum(map(len, weights))
        inputs = weights[0].shape[1]
        panels = self._empty_panels(outputs, inputs)
        first = 0
        for weight in weights:
            self._pack(weight, panels, first)
            first += len(weight)
        layer = self._compressed(panels, outputs, inputs)
        layer.bias = self._bias(torch.cat(list(biases)), outputs) if biases else None
        return layer

    def gated(self, gate: nn.Linear, up: nn.Linear) -> CLinear:
        """Pack two layers into one: of each panel the gate has the first half and the other the second."""
        outputs = len(gate.weight) + len(up.weight)
        inputs = gate.in_features
        half = PANEL // 2
        panels = self._empty_panels(outputs, inputs)
        self._pack(gate.weight, panels, 0, half, 0)
        self._pack(up.weight, panels, 0, half, half)
        layer = self._compressed(panels, outputs, inputs)
        if gate.bias is not None:
            both = torch.stack((gate.bias.view(-1, half), up.bias.view(-1, half)), dim=1)
            layer.bias = self._bias(both.flatten(), outputs)
        return layer

    def address(self, tensor: Tensor) -> int:
        """Return where a tensor is, and keep it there."""
        self.kept.append(tensor)
        return tensor.data_ptr()

    def _empty_panels(self, outputs: int, inputs: int) -> Tensor:
        size = num_panels(outputs) * PANEL * inputs
        if size > len(self._panels):
            self._panels = torch.empty(size, dtype=torch.bfloat16)
        return self._panels[:size].zero_() if outputs % PANEL else self._panels[:size]

    def _pack(self, weight: Tensor, panels: Tensor, *places: int) -> None:
        self._kernels.pack(self._pool, weight, panels, *places)
        self._progress.advance(weight.nbytes)

    def _compressed(self, panels: Tensor, outputs: int, inputs: int) -> CLinear:
        size = weight_bytes(outputs, inputs)
        taken = self._free[:size]
        self._free = self._free[_rounded(size) :]
        compressed = compress(self._kernels, self._pool, panels, outputs, inputs, taken)
        self.kept.extend(compressed.kept)
        self.num_others += compressed.num_others
        return compressed.layer

    def _bias(self, bias: Tensor, outputs: int) -> int:
        padded = torch.zeros(num_panels(outputs) * PANEL, dtype=torch.bfloat16)
        padded[:outputs] = bias
        return self.address(padded)


def _rounded(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to whole cache lines."""
    return -(-num_bytes // _LINE) * _LINE


def packed_bytes(weight: Tensor) -> int:
    """Return an upper bound of what a layer takes: it may begin a new panel, and a new line."""
    return weight_bytes(len(weight) + PANEL, weight.shape[1]) + _LINE


def _pages(num_bytes: int) -> Tensor:
    """Return fresh memory, page aligned."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
