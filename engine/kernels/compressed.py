"""One linear layer's weights in 12 bits each, without loss: see ``compressed.c``."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.binding import NUM_CODES, PANEL, CLinear, Kernels


@dataclass(frozen=True)
class Compressed:
    """A layer in the form that the kernels read. ``kept`` owns the memory that it points to."""

    layer: CLinear
    kept: tuple[Tensor, ...]

    @property
    def num_others(self) -> int:
        """The number of weights stored in full, because their upper byte is not among the common ones."""
        return len(self.kept[-1])


def num_panels(outputs: int) -> int:
    """Return the number of panels that these outputs fill."""
    return -(-outputs // PANEL)


def weight_bytes(outputs: int, inputs: int) -> int:
    """Return the bytes of the weights, except the few that have no code."""
    return num_panels(outputs) * PANEL * inputs * 3 // 2


def compress(
    kernels: Kernels, pool: int, panels: Tensor, outputs: int, inputs: int, weight: Tensor | None = None
) -> Compressed:
    """Compress packed panels, which are not needed afterwards, into a layer without bias. weight: memory for its codes."""
    if weight is None:
        weight = torch.empty(weight_bytes(outputs, inputs), dtype=torch.uint8)
    uppers = torch.empty(NUM_CODES, dtype=torch.uint8)
    starts = torch.empty(num_panels(outputs) + 1, dtype=torch.int32)
    where = (weight.data_ptr(), uppers.data_ptr(), starts.data_ptr())
    layer = CLinear(*where, None, None, inputs, outputs)
    others = torch.empty(kernels.compress(pool, panels, layer), 2, dtype=torch.int32)
    layer.others = others.data_ptr()
    kernels.list_others(pool, panels, layer)
    return Compressed(layer, (weight, uppers, starts, others))
