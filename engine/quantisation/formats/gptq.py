"""Weights of GPTQ (Frantar et al. 2022), AutoRound and AWQ: 4 or 8 bits with zero points, in words of int32.

GPTQ packs ``in_word`` numbers along the inputs, the lowest bits first: ``qweight [num_inputs / in_word, num_outputs]``. AWQ
packs them along the outputs, in an order of its own: ``qweight [num_inputs, num_outputs / in_word]``. Both have
``qzeros [num_groups, num_outputs / in_word]`` and ``scales [num_groups, num_outputs]``, and GPTQ the group of each input,
``g_idx [num_inputs]``. The first version of GPTQ stores zero points less 1, modulo 2 to the number of bits; its second
version and AWQ store them as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.models.checkpoint import Checkpoint
from engine.quantisation.scheme import (
    INTEGERS,
    PLACE,
    CodedWeight,
    Fields,
    Scheme,
    ceil_divide,
    expect,
    layers_of,
    matrix_shape,
    only_fitting,
)

if TYPE_CHECKING:
    from torch import Tensor

WORD_BITS = 32
_SERVED_BITS = (4, 8)
_KINDS = frozenset({"qweight", "qzeros", "scales"})


@dataclass(frozen=True)
class Packing:
    """The form of a layer. num_bits: of a number. size: inputs that share a scale, None for all.

    order: "gptq" or "awq", the layout of words. has_order: the group of each input must be stored.
    """

    num_bits: int
    size: int | None
    order: str
    has_order: bool = False
    zero_offset: int = 1

    def describe(self) -> str:
        """Return its numbers for people."""
        return f"int{self.num_bits}" + ("" if self.size is None else f" in groups of {self.size}")


class PackedScheme(Scheme):
    """Layers with qweight, qzeros and scales; each fits one of ``packings``. method: the name of the quantisation."""

    def __init__(self, method: str, packings: tuple[Packing, ...], ignored: frozenset[str]) -> None:
        self.method = method
        self.packings = packings
        super().__init__(ignored)

    def describe(self) -> str:
        """See Scheme."""
        names = dict.fromkeys(packing.describe() for packing in self.packings)
        return f"{' and '.join(names)} ({self.method})"

    def find(self, checkpoint: Checkpoint) -> dict[str, CodedWeight]:
        """See Scheme."""
        return {
            f"{layer}.weight": only_fitting(
                layer,
                f"parts of {PLACE}",
                self.packings,
                # Parts that differ in nothing else describe the same numbers.
                lambda packing: (packing.num_bits, packing.size),
                partial(_check_layer, checkpoint, layer, kinds),
            )
            for layer, kinds in layers_of(checkpoint).items()
            if "qweight" in kinds
        }


class _Weight(CodedWeight):
    """A layer's weight; its outputs lie along the last dimension of what is stored."""

    def __init__(
        self, checkpoint: Checkpoint, layer: str, kinds: set[str], shape: list[int], packing: Packing
    ) -> None:
        super().__init__(checkpoint, layer, kinds, shape)
        self._packing = packing
        self._has_order = "g_idx" in kinds

    def rows(self, first: int, end: int) -> "Tensor":
        """See CodedWeight."""
        from engine.quantisation.numbers import group_of_input, scaled, unpack, unpack_awq_rows, unpack_range

        packing = self._packing
        scale = self._finite("scales", self._stored("scales")[:, first:end]).t()
        if packing.order == "awq":
            codes = unpack_awq_rows(self._stored("qweight"), first, end)
            zeros = unpack_awq_rows(self._stored("qzeros"), first, end)
        else:
            codes = unpack(self._stored("qweight")[:, first:end].t(), packing.num_bits)
            zeros = unpack_range(self._stored("qzeros"), packing.num_bits, first, end).t()
            zeros = (zeros + packing.zero_offset) & ((1 << packing.num_bits) - 1)
        num_groups = scale.shape[1]
        if self._has_order:
            index = self._group_of_input("g_idx", num_groups)
        else:
            index = group_of_input(self.shape[1], packing.size or self.shape[1])
        return scaled(codes, scale, zeros.float(), index)


def read(config: Fields) -> PackedScheme:
    """Return the scheme of ``quant_method`` "gptq". Raises SettingError for one that is not served."""
    has_order = config.require("desc_act", True, False, None)
    config.require("is_marlin_format", False, None)
    config.require("pack_dtype", "int32", None)
    name = "checkpoint_format" if config.values.get("checkpoint_format") is not None else "format"
    version = config.require(name, "gptq", "gptq_v2", None)
    base = Packing(
        config.require("bits", *_SERVED_BITS),
        config.group_size("group_size", -1),
        "gptq",
        bool(has_order),
        0 if version == "gptq_v2" else 1,
    )
    # Exceptions are chosen by patterns, which are not evaluated: what is stored shows which layers they are.
    changes = _exceptions(config, "dynamic", base)
    return PackedScheme("gptq", (base, *changes), config.names("modules_to_not_convert"))


def read_awq(config: Fields) -> PackedScheme:
    """Return the scheme of ``quant_method`` "awq" (Lin et al. 2023). Raises SettingError for one that is not served."""
    version = config.values.get("version")
    if str(version).lower() != "gemm":
        config.require("version", "gemm", None)
    bits = "w_bit" if "w_bit" in config.values else "bits"
    size = "q_group_size" if "q_group_size" in config.values else "group_size"
    config.require("zero_point", True, False, None)
    base = Packing(config.require(bits, 4), config.group_size(size), "awq")
    return PackedScheme("awq", (base,), config.names("modules_to_not_convert"))


def read_auto_round(config: Fields) -> PackedScheme:
    """Return the scheme of ``quant_method`` "auto-round" (Cheng et al. 2023). Raises SettingError."""
    packing = config.require("packing_format", "auto_round:auto_gptq", "auto_round:auto_awq", None)
    is_awq = packing == "auto_round:auto_awq"
    config.require("data_type", "int", None)
    config.require("act_bits", 16, 32, None)
    base = Packing(
        config.require("bits", *((4,) if is_awq else _SERVED_BITS)),
        config.group_size("group_size"),
        "awq" if is_awq else "gptq",
    )
    changes = _exceptions(config, "extra_config", base)
    return PackedScheme("auto-round", (base, *changes), frozenset())


def _exceptions(config: Fields, name: str, base: Packing) -> list[Packing]:
    """Return the packings of single layers that differ from ``base``. Raises SettingError for one that is not served."""
    named: Any = config.values.get(name) or {}
    if not isinstance(named, Mapping):
        raise config.refused(name, "it must be an object")
    found = dict[Packing, None]()
    for layer, values in named.items():
        fields = Fields(f"{config.place}.{name}.{layer!s:.60}", values or {})
        if not fields.values or fields.values.get("bits") in (16, 32):  # not quantised
            continue
        bits = fields.values.get("bits", base.num_bits)
        if bits != base.num_bits:
            fields.require("bits", *((4,) if base.order == "awq" else _SERVED_BITS))
        size = fields.group_size("group_size", -1 if base.size is None else base.size)
        has_order = bool(fields.values.get("desc_act", base.has_order))
        found[Packing(bits, size, base.order, has_order, base.zero_offset)] = None
    return [packing for packing in found if packing != base]


def _check_layer(checkpoint: Checkpoint, layer: str, kinds: set[str], packing: Packing) -> CodedWeight:
    """Return a layer's weight. Raises SettingError unless its tensors are those that the packing requires."""
    stored = f"{layer}.qweight"
    expect(checkpoint, stored, None, INTEGERS)
    packed = matrix_shape(checkpoint, stored)
    in_word = WORD_BITS // packing.num_bits
    is_awq = packing.order == "awq"
    num_inputs, num_outputs = (packed[0], packed[1] * in_word) if is_awq else (packed[0] * in_word, packed[1])
    num_groups = ceil_divide(num_inputs, packing.size or num_inputs)
    expect(checkpoint, f"{layer}.scales", [[num_groups, num_outputs]])
    expect(checkpoint, f"{layer}.qzeros", [[num_groups, ceil_divide(num_outputs, in_word)]], INTEGERS)
    used = set(_KINDS)
    if not is_awq and ("g_idx" in kinds or packing.has_order):
        expect(checkpoint, f"{layer}.g_idx", [[num_inputs]], {"I32", "I64"})
        used.add("g_idx")
    return _Weight(checkpoint, layer, used, [num_outputs, num_inputs], packing)
