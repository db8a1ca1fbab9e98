"""Weights as compressed-tensors stores them: integers of 4 and 8 bits, packed or not, FP8, NVFP4; several groups of layers.

Format: https://github.com/vllm-project/compressed-tensors, ``QuantizationConfig`` and its compressors. Integers are stored
with an offset if they are packed, the lowest bits of a word of 32 first, and zero points are packed along the outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from engine.fp8.scheme import Activations, Fp8Scheme
from engine.models.checkpoint import Checkpoint, bad_model
from engine.models.config import bad_config
from engine.quantisation.scheme import (
    BYTES,
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

METHOD = "compressed-tensors"
_PACKED = "pack-quantized"
_INT = "int-quantized"
_FLOAT = "float-quantized"
_NVFP4 = "nvfp4-pack-quantized"
_MIXED = "mixed-precision"
FORMATS = (_PACKED, _INT, _FLOAT, _NVFP4)
_NUMBERS = {_PACKED: ("int", (4, 8)), _INT: ("int", (8,)), _FLOAT: ("float", (8,)), _NVFP4: ("float", (4,))}
_STRATEGIES = {
    _PACKED: ("tensor", "channel", "group"),
    _INT: ("tensor", "channel", "group"),
    _FLOAT: ("tensor", "channel", "group", "block"),
    _NVFP4: ("tensor_group",),
}
_ORDERS = {"group": True, "dynamic": True, "weight": False, "static": False, None: False, False: False}
"""Values of ``actorder``, and whether the groups of inputs are stored (``weight_g_idx``)."""
_UNSTRUCTURED = ("dense", None)
_OF_INPUTS = frozenset({"input_scale", "input_zero_point", "input_global_scale"})
_KV_SCALES = (".k_scale", ".v_scale")
_DTYPES = {_INT: frozenset({"I8"}), _FLOAT: frozenset({"F8_E4M3"})}


@dataclass(frozen=True)
class Group:
    """One of the ``config_groups``: the way in which some layers are stored.

    size: inputs that share a scale, None for all of a row. block: rows and columns that share one. has_order: the group of
    each input is stored. activations: the scale of the layers' inputs.
    """

    form: str
    num_bits: int
    strategy: str
    size: int | None
    block: tuple[int, int] | None
    is_symmetric: bool
    has_order: bool
    activations: Activations

    def describe(self) -> str:
        """Return its numbers and their scales for people."""
        name = {_FLOAT: "FP8", _NVFP4: "NVFP4"}.get(self.form, f"int{self.num_bits}")
        if self.block is not None:
            return f"{name} in blocks of {self.block[0]} x {self.block[1]}"
        if self.size is not None and self.form != _NVFP4:
            return f"{name} in groups of {self.size}"
        return name


class CompressedScheme(Scheme):
    """Layers in one or several groups; each layer belongs to the group that describes its tensors."""

    def __init__(self, groups: tuple[Group, ...], ignored: frozenset[str], has_kv_scales: bool) -> None:
        self.groups = groups
        super().__init__(ignored)
        self._has_kv_scales = has_kv_scales

    def describe(self) -> str:
        """See Scheme."""
        names = dict.fromkeys(group.describe() for group in self.groups)
        return f"{' and '.join(names)} ({METHOD})"

    def find(self, checkpoint: Checkpoint) -> dict[str, CodedWeight]:
        """See Scheme."""
        found: dict[str, CodedWeight] = {}
        layers = layers_of(checkpoint)
        of_shapes = [f"{layer}.weight_shape" for layer, kinds in layers.items() if "weight_shape" in kinds]
        shapes = checkpoint.integers(name for name in of_shapes if checkpoint.shape(name) == [2])
        for layer, kinds in layers.items():
            is_packed = "weight_packed" in kinds
            if not is_packed and "weight" not in kinds:
                continue
            if is_packed or checkpoint.stored_dtype(f"{layer}.weight") in _DTYPES[_INT] | _DTYPES[_FLOAT]:
                found[f"{layer}.weight"] = only_fitting(
                    layer,
                    f"{PLACE}.config_groups",
                    self.groups,
                    # Of groups whose scales differ in nothing for this layer, any will do.
                    lambda group: (group.size, group.block),
                    partial(_check_layer, checkpoint, shapes, layer, kinds),
                )
        return found

    def is_unused(self, name: str) -> bool:
        """See Scheme."""
        return self._has_kv_scales and name.endswith(_KV_SCALES)


class _Weight(CodedWeight):
    """A layer's weight in the form of its group. group: see Group."""

    def __init__(
        self, checkpoint: Checkpoint, layer: str, kinds: set[str], shape: list[int], group: Group
    ) -> None:
        super().__init__(checkpoint, layer, kinds, shape)
        self._group = group

    def rows(self, first: int, end: int) -> "Tensor":
        """See CodedWeight."""
        from engine.quantisation.numbers import group_of_input, scaled

        group = self._group
        num_inputs = self.shape[1]
        scale = self._scales(first, end)
        index = None
        if group.has_order:
            index = self._group_of_input("weight_g_idx", scale.shape[1])
        elif scale.shape[1] > 1:
            index = group_of_input(num_inputs, group.block[1] if group.block else group.size or num_inputs)
        zero = None if group.is_symmetric else self._zeros(first, end)
        return scaled(self._codes(first, end), scale, zero, index)

    def _codes(self, first: int, end: int) -> "Tensor":
        from engine.quantisation.numbers import fp4, unpack

        group = self._group
        if group.form in (_INT, _FLOAT):
            return self._stored("weight")[first:end]
        stored = self._stored("weight_packed")[first:end]
        if group.form == _NVFP4:
            return fp4(stored)
        return unpack(stored, group.num_bits)[:, : self.shape[1]] - (1 << group.num_bits - 1)

    def _scales(self, first: int, end: int) -> "Tensor":
        """Return the scales of some rows, ``[num_rows, num_groups]``."""
        import torch

        group = self._group
        stored = self._stored("weight_scale")
        if group.strategy == "tensor":
            return self._finite("weight_scale", stored).reshape(1, 1).expand(end - first, 1)
        if group.block is not None:
            return self._finite("weight_scale", stored)[torch.arange(first, end) // group.block[0]]
        scale = self._finite("weight_scale", stored.reshape(self.shape[0], -1)[first:end])
        if group.form == _NVFP4:
            scale = scale / self._finite("weight_global_scale", self._stored("weight_global_scale"))
        return scale

    def _zeros(self, first: int, end: int) -> "Tensor":
        """Return the zero points of some rows, ``[num_rows, num_groups]``."""
        from engine.quantisation.numbers import unpack_range

        group = self._group
        stored = self._stored("weight_zero_point")
        if group.strategy == "tensor":
            return stored.reshape(1, 1).float()
        if group.form == _INT:
            return stored.reshape(self.shape[0], -1)[first:end].float()
        numbers = unpack_range(stored.t(), group.num_bits, first, end).t()
        return (numbers - (1 << group.num_bits - 1)).float()


def read(config: Fields) -> CompressedScheme | Fp8Scheme:
    """Return the scheme of a ``quantization_config``. Raises SettingError for one that is not served.

    Layers of FP8 with one scale for each output or layer, all alike, are those that can be multiplied as FP8.
    """
    if config.values.get("weight_block_size"):
        raise config.refused("weight_block_size", "only config_groups describe blocks in this format")
    form = config.require("format", *FORMATS, _MIXED)
    config.require("quantization_status", "compressed", None)
    if transforms := config.values.get("transform_config"):
        raise bad_config(f"{PLACE}.transform_config is {transforms!r:.80}; transforms are not served")
    if sparsity := config.values.get("sparsity_config"):
        Fields(f"{PLACE}.sparsity_config", sparsity).require("format", *_UNSTRUCTURED)
    named = config.values.get("config_groups")
    if not isinstance(named, Mapping) or not named:
        raise config.refused("config_groups", "it must have groups of layers by name")
    groups = tuple(
        _read_group(Fields(f"{PLACE}.config_groups.{name!s:.40}", values), form)
        for name, values in named.items()
    )
    ignored = config.names("ignore")
    has_kv_scales = bool(config.values.get("kv_cache_scheme"))
    only = groups[0]
    if len(groups) == 1 and only.form == _FLOAT and only.strategy in ("tensor", "channel"):
        return Fp8Scheme(only.strategy == "channel", only.activations, ignored, has_kv_scales)
    return CompressedScheme(groups, ignored, has_kv_scales)


def _read_group(group: Fields, form: str) -> Group:
    if form == _MIXED or group.values.get("format") is not None:
        form = group.require("format", *(FORMATS if form == _MIXED else (form,)))
    if group.values.get("output_activations"):
        raise group.refused("output_activations", "quantised outputs are not served")
    weights = Fields(f"{group.place}.weights", group.values.get("weights"))
    kind, bits = _NUMBERS[form]
    weights.require("type", kind)
    num_bits = weights.require("num_bits", *bits)
    strategy = weights.require("strategy", *_STRATEGIES[form])
    is_symmetric = weights.require("symmetric", True, None, *((False,) if kind == "int" else ()))
    weights.require("dynamic", False, None)
    block = (
        weights.block("block_structure") if strategy == "block" else weights.require("block_structure", None)
    )
    size = None
    if strategy in ("group", "tensor_group"):
        size = weights.group_size("group_size")
    else:
        weights.require("group_size", None, *((-1,) if strategy == "channel" else ()))
    has_order = False
    if weights.values.get("actorder"):
        has_order = _ORDERS[weights.require("actorder", *((*_ORDERS,) if strategy == "group" else (None,)))]
    return Group(
        form,
        num_bits,
        strategy,
        size,
        block,
        is_symmetric is not False,
        has_order,
        _activations(group, form, strategy),
    )


def _activations(group: Fields, form: str, strategy: str) -> Activations:
    """Return the scale of the inputs, which are multiplied in 16 bits or more if weights are dequantised."""
    values = group.values.get("input_activations")
    if values is None:
        return Activations.NONE
    inputs = Fields(f"{group.place}.input_activations", values)
    if form != _FLOAT:
        inputs.require("type", "int", "float")
        inputs.require("num_bits", 4, 8)
        inputs.require("dynamic", True, False, "local", None)
        return Activations.NONE if inputs.values.get("dynamic") is True else Activations.FIXED
    inputs.require("type", "float")
    inputs.require("num_bits", 8)
    inputs.require("symmetric", True, None)
    if strategy in ("block", "group"):
        inputs.require("strategy", "group", "token", "tensor")
        inputs.require("dynamic", True, False)
        return Activations.TOKEN if inputs.values["dynamic"] else Activations.FIXED
    inputs.require("group_size", None)
    inputs.require("dynamic", True, False)
    if inputs.values["dynamic"]:
        inputs.require("strategy", "token")
        return Activations.TOKEN
    inputs.require("strategy", "tensor")
    return Activations.FIXED


def _check_layer(
    checkpoint: Checkpoint, shapes: Mapping[str, list[int]], layer: str, kinds: set[str], group: Group
) -> CodedWeight:
    """Return a layer's weight. Raises SettingError unless its tensors are those that the group requires.

    shapes: the content of the tensors that hold shapes, by name.
    """
    used = {"weight_scale"}
    if group.form in (_PACKED, _NVFP4):
        shape = _check_packed(checkpoint, shapes, layer, group)
        used |= {"weight_packed"} | ({"weight_shape"} if group.form == _PACKED else {"weight_global_scale"})
    else:
        expect(checkpoint, f"{layer}.weight", None, _DTYPES[group.form])
        shape = matrix_shape(checkpoint, f"{layer}.weight")
        used.add("weight")
    num_outputs, num_inputs = shape
    of_scales = {
        "tensor": [[1], []],
        "channel": [[num_outputs, 1], [num_outputs]],
        "block": [[ceil_divide(num_outputs, group.block[0]), ceil_divide(num_inputs, group.block[1])]]
        if group.block
        else [],
    }.get(group.strategy, [[num_outputs, ceil_divide(num_inputs, group.size or num_inputs)]])
    if group.form == _NVFP4:
        expect(checkpoint, f"{layer}.weight_scale", of_scales, {"F8_E4M3"})
        expect(checkpoint, f"{layer}.weight_global_scale", [[1], []])
    else:
        expect(checkpoint, f"{layer}.weight_scale", of_scales)
    if not group.is_symmetric:
        used.add("weight_zero_point")
        name = f"{layer}.weight_zero_point"
        if group.form == _PACKED and group.strategy != "tensor":
            words = ceil_divide(num_outputs, 32 // group.num_bits)
            expect(checkpoint, name, [[words, *of_scales[0][1:]]], INTEGERS)
        else:
            expect(checkpoint, name, of_scales, {"I8"})
    if group.has_order:
        used.add("weight_g_idx")
        expect(checkpoint, f"{layer}.weight_g_idx", [[num_inputs]], {"I32", "I64"})
    if group.activations is not Activations.NONE:
        used |= _OF_INPUTS & kinds
    return _Weight(checkpoint, layer, used, shape, group)


def _check_packed(
    checkpoint: Checkpoint, shapes: Mapping[str, list[int]], layer: str, group: Group
) -> list[int]:
    """Return the shape of a packed weight. Raises SettingError if it is packed otherwise."""
    packed = f"{layer}.weight_packed"
    if group.form == _NVFP4:
        expect(checkpoint, packed, None, BYTES)
        stored = matrix_shape(checkpoint, packed)
        return [stored[0], stored[1] * 2]
    name = f"{layer}.weight_shape"
    expect(checkpoint, name, [[2]], {"I64", "I32"})
    shape = shapes[name]
    if min(shape) < 1:
        raise bad_model(f"tensor {name} has {shape}; both numbers must be above 0")
    words = ceil_divide(shape[1], 32 // group.num_bits)
    expect(checkpoint, packed, [[shape[0], words]], INTEGERS)
    return shape
