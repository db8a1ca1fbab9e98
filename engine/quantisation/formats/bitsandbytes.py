"""Weights of bitsandbytes: NF4 and FP4 in blocks (Dettmers et al. 2023), and LLM.int8 with a scale for each output.

Four bits: ``weight`` has two numbers in each byte, the higher half first, in the order of the flat weight; ``absmax`` has a
scale for each block of them, itself in 8 bits if ``nested_absmax`` is there; ``quant_map`` has the 16 values; and
``quant_state.bitsandbytes__nf4`` is JSON with the shape. Eight bits: ``weight`` is int8, and ``SCB`` the largest of a row.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.models.checkpoint import Checkpoint, bad_model
from engine.quantisation.scheme import (
    BYTES,
    CodedWeight,
    Fields,
    Scheme,
    ceil_divide,
    expect,
    layers_of,
    matrix_shape,
)

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 127.0
_STATE = "quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
_CODES = 16
_MAX_STATE_BYTES = 4096
_NESTED_CODES = 256
_NESTED = frozenset({"nested_absmax", "nested_quant_map"})


class BitsAndBytesScheme(Scheme):
    """num_bits: 4 or 8. ignored: names of modules that are not quantised."""

    def __init__(self, num_bits: int, kind: str, ignored: frozenset[str]) -> None:
        self.num_bits = num_bits
        self._kind = kind
        super().__init__(ignored)

    def describe(self) -> str:
        """See Scheme."""
        return f"{self._kind} (bitsandbytes)"

    def find(self, checkpoint: Checkpoint) -> dict[str, CodedWeight]:
        """See Scheme."""
        layers = layers_of(checkpoint)
        if self.num_bits == 8:
            return {
                f"{layer}.weight": _int8(checkpoint, layer, kinds)
                for layer, kinds in layers.items()
                if "SCB" in kinds
            }
        # The name of a quantised weight stands before those of its parts; its state has a dot in its name.
        places = sorted(
            {name.partition(f".{_STATE}")[0] for name in checkpoint.names() if f".{_STATE}" in name}
        )
        return {place: _four_bits(checkpoint, place) for place in places}


@dataclass(frozen=True)
class _State:
    """The description of a weight: its shape, and the numbers that share a scale, and that share a scale of scales."""

    shape: list[int]
    block_size: int
    nested_block_size: int | None
    nested_offset: float


class _FourBits(CodedWeight):
    """A weight in NF4 or FP4."""

    def __init__(self, checkpoint: Checkpoint, place: str, kinds: set[str], state: _State) -> None:
        super().__init__(checkpoint, place, kinds, state.shape)
        self.parts |= {place}
        self._state = state

    def rows(self, first: int, end: int) -> "Tensor":
        """See CodedWeight."""
        from engine.quantisation.numbers import nibbles

        width = self.shape[1]
        begin = first * width
        stop = end * width
        stored = self._checkpoint.tensor(self._place).flatten()[begin // 2 : ceil_divide(stop, 2)]
        codes = nibbles(stored, is_high_first=True)[begin % 2 :][: stop - begin]
        values = self._finite("quant_map", self._stored("quant_map"))[codes]
        size = self._state.block_size
        block = begin // size
        scale = self._scales(block, ceil_divide(stop, size)).repeat_interleave(size)
        values *= scale[begin - block * size :][: stop - begin]
        return values.reshape(end - first, width)

    def _scales(self, first: int, end: int) -> "Tensor":
        """Return the scales of some blocks."""
        import torch

        absmax = self._stored("absmax")[first:end]
        if self._state.nested_block_size is None:
            return self._finite("absmax", absmax)
        outer = self._finite("nested_absmax", self._stored("nested_absmax"))
        table = self._finite("nested_quant_map", self._stored("nested_quant_map"))
        block = torch.arange(first, end) // self._state.nested_block_size
        return table[absmax.int()] * outer[block] + self._state.nested_offset


class _EightBits(CodedWeight):
    """A weight of LLM.int8."""

    def rows(self, first: int, end: int) -> "Tensor":
        """See CodedWeight."""
        scale = self._finite("SCB", self._stored("SCB")[first:end])
        return self._stored("weight")[first:end].float() * (scale / _LARGEST)[:, None]


def read(config: Fields) -> BitsAndBytesScheme:
    """Return the scheme of ``quant_method`` "bitsandbytes". Raises SettingError for one that is not served."""
    ignored = config.names("llm_int8_skip_modules")
    is_eight = config.require("load_in_8bit", True, False, None) or config.values.get("_load_in_8bit") is True
    if is_eight:
        return BitsAndBytesScheme(8, "int8", ignored)
    config.require("load_in_4bit", True)
    kind = config.require("bnb_4bit_quant_type", *_KINDS)
    config.require("bnb_4bit_quant_storage", "uint8", None)
    return BitsAndBytesScheme(4, str(kind).upper(), ignored)


def _int8(checkpoint: Checkpoint, layer: str, kinds: set[str]) -> CodedWeight:
    expect(checkpoint, f"{layer}.weight", None, {"I8"})
    shape = matrix_shape(checkpoint, f"{layer}.weight")
    expect(checkpoint, f"{layer}.SCB", [shape[:1]])
    if "weight_format" in kinds:
        name = f"{layer}.weight_format"
        expect(checkpoint, name, [[], [1]], BYTES)
        if checkpoint.tensor(name).reshape(-1).tolist() != [0]:
            raise bad_model(f"tensor {name} is not 0; only weights in the order of rows are served")
    return _EightBits(checkpoint, layer, {"weight", "SCB", "weight_format"} & kinds, shape)


def _four_bits(checkpoint: Checkpoint, place: str) -> CodedWeight:
    kind = next((each for each in _KINDS if f"{place}.{_STATE}{each}" in checkpoint.names()), None)
    if kind is None:
        raise bad_model(
            f"tensor {place} is stored in a way of bitsandbytes other than {' and '.join(_KINDS)}"
        )
    state = _read_state(checkpoint, f"{place}.{_STATE}{kind}", kind)
    expect(checkpoint, place, [[ceil_divide(math.prod(state.shape), 2), 1]], BYTES)
    num_blocks = ceil_divide(math.prod(state.shape), state.block_size)
    used = {"absmax", "quant_map", f"{_STATE}{kind}"}
    expect(checkpoint, f"{place}.quant_map", [[_CODES]])
    if state.nested_block_size is None:
        expect(checkpoint, f"{place}.absmax", [[num_blocks]])
    else:
        used |= _NESTED
        expect(checkpoint, f"{place}.absmax", [[num_blocks]], BYTES)
        num_outer = ceil_divide(num_blocks, state.nested_block_size)
        expect(checkpoint, f"{place}.nested_absmax", [[num_outer]])
        expect(checkpoint, f"{place}.nested_quant_map", [[_NESTED_CODES]])
    return _FourBits(checkpoint, place, used, state)


def _read_state(checkpoint: Checkpoint, name: str, kind: str) -> _State:
    """Return the JSON in a tensor of bytes. Raises SettingError for one that describes no weight."""
    expect(checkpoint, name, None, BYTES)
    if (num_bytes := math.prod(checkpoint.shape(name))) > _MAX_STATE_BYTES:
        raise bad_model(f"tensor {name} has {num_bytes} bytes; a description has {_MAX_STATE_BYTES} at most")
    try:
        state: Any = json.loads(bytes(checkpoint.tensor(name).reshape(-1).tolist()))
    except (ValueError, RecursionError) as error:
        raise bad_model(f"tensor {name} is no JSON: {error}") from error
    if not isinstance(state, Mapping) or state.get("quant_type") != kind:
        raise bad_model(f"tensor {name} is {state!r:.80}; it must describe numbers of {kind}")
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2:
        raise bad_model(f"tensor {name} has the shape {shape!r:.40}; quantised weights have two dimensions")
    nested = state.get("nested_blocksize")
    sizes = [*shape, state.get("blocksize"), *([] if nested is None else [nested])]
    if any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in sizes):
        raise bad_model(f"tensor {name} has the sizes {sizes!r:.80}; they must be whole numbers above 0")
    offset = state.get("nested_offset", 0.0)
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not abs(offset) < math.inf:
        raise bad_model(f"tensor {name} has the nested_offset {offset!r:.40}; it must be a number")
    return _State(shape, state["blocksize"], nested, float(offset))
