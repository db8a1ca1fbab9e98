"""The states of recurrent layers: what such a layer keeps of a text has one size, whatever the text's length.

A slot holds all states of one request. Slots are numbered from 1; slot 0 is none. A slot is handed over in pieces of equal
size, which stand in a transfer for blocks: it may have as many bytes as the KV of thousands of tokens.
"""

from collections.abc import Iterator
from itertools import zip_longest
from math import prod
from typing import Annotated

import msgspec

from contract.decoding import Positive
from contract.layout import DTYPE_BYTES, STATES, KVLayout

NO_SLOT = 0
"""The slot of a request whose states are dropped: of a dummy."""
# Each state begins at a multiple of this, so that it can have numbers of any size.
_ALIGNMENT = 64
_PIECE_BYTES = 1 << 20
_PIECE_DTYPE = "float32"


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
        """The size of a slot: a whole number of pieces, so that the states may end some bytes before."""
        return self.num_pieces * self.piece_layout.block_bytes

    @property
    def num_pieces(self) -> int:
        """The number of pieces of a slot, of a mebibyte at most."""
        return -(-self._num_bytes // _PIECE_BYTES)

    @property
    def piece_layout(self) -> KVLayout:
        """The shape of a piece, as if it were a block: of any numbers, since no piece is converted."""
        num_bytes = _aligned(-(-self._num_bytes // self.num_pieces))
        size = num_bytes // DTYPE_BYTES[_PIECE_DTYPE]
        return KVLayout(
            num_layers=1, num_kv_heads=1, head_dim=size, block_size=1, dtype=_PIECE_DTYPE, parts=STATES
        )

    def pieces_of(self, slot: int) -> range:
        """Return the numbers of a slot's pieces among those of all slots."""
        return range((slot - 1) * self.num_pieces, slot * self.num_pieces)

    def difference(self, other: "StateLayout | None") -> str | None:
        """Return the first difference of two layouts, as "states: ours is A, the peer's is B"; None if they are equal."""
        ours = [*self.parts, None]
        theirs = [*(other.parts if other else ()), None]
        for own, their in zip_longest(ours, theirs):
            if own != their:
                return f"states of recurrent layers: ours is {_told(own)}, the peer's is {_told(their)}"
        return None

    @property
    def _num_bytes(self) -> int:
        return sum(_aligned(part.num_bytes) for part in self.parts)

    @property
    def num_layers(self) -> int:
        """The number of layers that have states."""
        return len({part.layer for part in self.parts})


def _told(part: StatePart | None) -> str:
    if part is None:
        return "none"
    return f"{part.name} {part.index} of layer {part.layer}, {list(part.shape)} of {part.dtype}"


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
