"""The tiles of products of small batches, measured on an H100 for the sizes of Llama 3.1 8B and Qwen 2.5 1.5B.

They are needed without Triton too: by tests, and by what compiles the kernels for a device that is not here.
"""

from dataclasses import dataclass
from enum import Enum, auto

_FEW = 16
_MOST = 64


@dataclass(frozen=True)
class Tiles:
    """The division of a product among programs. rows: 1, or a power of two from 16 on, computed by matrix units."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int = 1
    splits: int = 1

    def share(self, num_inputs: int) -> int:
        """Return the inputs of a split, whole tiles."""
        return -(-num_inputs // (self.inputs * self.splits)) * self.inputs


class Form(Enum):
    """Operations that a kernel computes beside the product."""

    NORMED = auto()
    """The norm before it."""
    GATED = auto()
    """The norm before it, and the gate behind it."""
    ADDED = auto()
    PLAIN = auto()


def tiles_of(form: Form, num_rows: int, num_outputs: int, num_inputs: int) -> Tiles | None:
    """Return the tiles of a product; None if a library multiplies as fast. num_outputs: gate and up if gated."""
    if num_rows == 1:
        return Tiles(1, 2, 1024, num_warps=4) if num_outputs < 2048 else Tiles(1, 4, 512, num_warps=4)
    if 1 < num_rows <= _FEW:
        return _of_few(form, num_outputs)
    if _FEW < num_rows <= _MOST:
        return _of_more(form, num_outputs, num_inputs)
    return None


def _of_few(form: Form, num_outputs: int) -> Tiles:
    if form is Form.GATED:
        return Tiles(_FEW, 64, 128, num_warps=4, num_stages=3)
    if form is Form.NORMED:
        return Tiles(_FEW, 32, 128, num_warps=4, num_stages=5)
    if form is Form.ADDED and num_outputs < 4096:
        return Tiles(_FEW, 32, 128, num_warps=4, num_stages=4, splits=4)
    return Tiles(_FEW, 16, 256, num_warps=4, num_stages=4)


def _of_more(form: Form, num_outputs: int, num_inputs: int) -> Tiles | None:
    if form is Form.NORMED and num_outputs <= 2048:
        return Tiles(_MOST, 16, 128, num_warps=4, num_stages=4)
    if form is Form.GATED and num_inputs < 4096:
        return Tiles(_MOST, 64, 64, num_warps=4, num_stages=4)
    if form is Form.GATED:
        return Tiles(_MOST, 32, 128, num_warps=4, num_stages=3)
    if form is Form.PLAIN:
        return Tiles(_MOST, 32, 128, num_warps=4, num_stages=4)
    return None
