"""The states of recurrent layers: what such a layer keeps of a text has one size, whatever the text's length.

A slot holds all states of one request. Slots are numbered from 1; slot 0 is none.
"""

from collections.abc import Iterator
from math import prod
from typing import Annotated

import msgspec

from contract.decoding import Positive
from contract.layout import DTYPE_BYTES

NO_SLOT = 0
"""The slot of a request whose states are dropped: of a dummy."""
# Each state begins at a multiple of this, so that it can have numbers of any size.
_ALIGNMENT = 64


class StatePart(msgspec.Struct, frozen=True, kw_only=True):
    """One state of one layer.

    layer: its number in the model. name: "conv" (the last inputs of a convolution) or "recurrent". index: of several states
    of that name. shape: the axes of its numbers.
    """

    layer: Annotated[int, msgspec.Meta(ge=0)]
    name: str
    index: Annotated[int, msgspec.Meta(ge=0)] = 0
    shape: tuple[Positive, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """The size of the state."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class StateLayout(msgspec.Struct, frozen=True):
    """The contents of a slot: the states of all recurrent layers of a model, one behind the other."""

    parts: Annotated[tuple[StatePart, ...], msgspec.Meta(min_length=1)]

    def placed(self) -> Iterator[tuple[StatePart, int]]:
        """Yield each state with the byte of the slot at which it begins."""
        start = 0
        for part in self.parts:
            yield part, start
            start += _aligned(part.num_bytes)

    @property
    def slot_bytes(self) -> int:
        """The size of a slot."""
        return sum(_aligned(part.num_bytes) for part in self.parts)

    @property
    def num_layers(self) -> int:
        """The number of layers that have states."""
        return len({part.layer for part in self.parts})


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
