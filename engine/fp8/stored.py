"""A checkpoint with FP8 weights, as a model reads it: each layer's weight in FP8 with a scale, or converted.

Which layers are quantised is decided by what is stored: a weight in FP8 and its scale. Anything else that is stored in few
bits is refused by name.
"""

from collections.abc import Set
from typing import TYPE_CHECKING

from engine.fp8.scheme import Activations, Fp8Scheme
from engine.models.checkpoint import PLAIN_DTYPES, Checkpoint, bad_model

if TYPE_CHECKING:
    from torch import Tensor

    from engine.models.sharding import Part

STORED = "F8_E4M3"
_WEIGHT = "weight"
_SCALE = "weight_scale"
_INPUT_SCALE = "input_scale"
_KV_SCALES = (".k_scale", ".v_scale")


class Fp8Checkpoint:
    """The weights of one folder, by name, for a model whose ``multiplied`` layers take FP8 weights; see ``Checkpoint``.

    Such a layer has ``weight`` in FP8, ``weight_scale`` ``[num_outputs, 1]`` and, if the scales of inputs are stored,
    ``input_scale`` ``[1]``, both in float32. The weights of other layers are converted to float32.
    Raises SettingError for a checkpoint that differs from its scheme.
    """

    def __init__(self, checkpoint: Checkpoint, scheme: Fp8Scheme) -> None:
        self.is_bare = checkpoint.is_bare
        self.multiplied: frozenset[str] = frozenset()
        self.scheme = scheme
        self._checkpoint = checkpoint
        self._has_input_scales = scheme.activations is Activations.FIXED
        stored = checkpoint.names()
        ends = map(_split, stored)
        self.layers = frozenset(
            layer for layer, kind in ends if kind == _SCALE and f"{layer}.{_WEIGHT}" in stored
        )
        hidden = self._scales_of(self.layers)
        if scheme.has_kv_scales:
            hidden |= {name for name in stored if name.endswith(_KV_SCALES)}
        self._others = stored - hidden
        if not self.layers:
            raise bad_model(
                "config.json has a quantization_config, and no weight in the checkpoint has a scale"
            )
        for layer in sorted(self.layers):
            _check_layer(self._checkpoint, self.scheme, layer)
        for name in sorted(self._others):
            dtype = self._checkpoint.stored_dtype(name)
            if dtype.startswith("F8") and _split(name)[0] not in self.layers:
                raise bad_model(f"tensor {name} is stored as {dtype} without a weight_scale")

    def names(self) -> Set[str]:
        """Return the names of all tensors."""
        return self._others | self._scales_of(self.multiplied)

    def stored_dtype(self, name: str) -> str:
        """Return the dtype of what ``tensor`` returns, as safetensors names it."""
        layer, kind = _split(name)
        if layer not in self.layers:
            return self._checkpoint.stored_dtype(name)
        return STORED if kind == _WEIGHT and layer in self.multiplied else "F32"

    def shape(self, name: str) -> list[int]:
        """Return the tensor's shape."""
        layer, kind = _split(name)
        if layer in self.layers and kind == _INPUT_SCALE:
            return [1]
        if layer in self.layers and kind == _SCALE:
            return [self._num_outputs(layer), 1]
        return self._checkpoint.shape(name)

    def tensor(self, name: str) -> "Tensor":
        """Return the tensor on the host."""
        return self._read(name, None)

    def part(self, name: str, part: "Part") -> "Tensor":
        """Return a part of the tensor on the host; of a weight, only the bytes of that part are read."""
        return self._read(name, part)

    def first_dtype(self) -> str:
        """Return the dtype of the tensor whose name sorts first among those that are not quantised."""
        plain = [name for name in self._others if _split(name)[0] not in self.layers]
        return self._checkpoint.named_dtype(min(plain)) if plain else "float32"

    def is_spare(self, name: str) -> bool:
        """Return False: each tensor belongs to the model."""
        return False

    def _read(self, name: str, part: "Part | None") -> "Tensor":
        layer, kind = _split(name)
        if layer in self.layers and kind == _INPUT_SCALE:
            return self._scale(name, may_be_zero=False).view(1)
        if layer in self.layers and kind == _SCALE:
            return self._weight_scale(layer, part)
        stored = self._checkpoint.tensor(name) if part is None else self._checkpoint.part(name, part)
        if kind != _WEIGHT or layer not in self.layers - self.multiplied:
            return stored
        # A scale belongs to a row, so a part of the columns needs all of them.
        rows = part if part is not None and part.dim == 0 else None
        return stored.float().mul_(self._weight_scale(layer, rows))

    def _weight_scale(self, layer: str, part: "Part | None") -> "Tensor":
        """Return the scale of each row, ``[num_rows, 1]``, of the layer or of a part of its rows."""
        num_rows = self._num_outputs(layer)
        whole = self._scale(f"{layer}.{_SCALE}").reshape(-1, 1).expand(num_rows, 1)
        return (whole if part is None else part.assemble(lambda own: whole[own])).contiguous()

    def _scale(self, name: str, *, may_be_zero: bool = True) -> "Tensor":
        """Return a scale. That of a weight of zeros may be 0; inputs are divided by theirs."""
        scale = self._checkpoint.tensor(name).float()
        is_right = scale.isfinite() & ((scale >= 0) if may_be_zero else (scale > 0))
        if not bool(is_right.all()):
            raise bad_model(f"tensor {name} has values that are no scales")
        return scale

    def _num_outputs(self, layer: str) -> int:
        return self._checkpoint.shape(f"{layer}.{_WEIGHT}")[0]

    def _scales_of(self, layers: frozenset[str]) -> set[str]:
        kinds = (_SCALE, _INPUT_SCALE) if self._has_input_scales else (_SCALE,)
        return {f"{layer}.{kind}" for layer in layers for kind in kinds}


def _check_layer(checkpoint: Checkpoint, scheme: Fp8Scheme, layer: str) -> None:
    """Raise SettingError unless a layer's tensors have the dtypes and shapes that the scheme requires."""
    weight = f"{layer}.{_WEIGHT}"
    if layer in scheme.ignored:
        raise bad_model(f"layer {layer} has a weight_scale, and quantization_config.ignore names it")
    if (dtype := checkpoint.stored_dtype(weight)) != STORED:
        raise bad_model(
            f"tensor {weight} has a weight_scale and is stored as {dtype}; only {STORED} is served"
        )
    shape = checkpoint.shape(weight)
    if len(shape) != 2:
        raise bad_model(f"tensor {weight} is {shape}; quantised weights have two dimensions")
    per_output = [[shape[0], 1], [shape[0]]]
    _check_scale(checkpoint, f"{layer}.{_SCALE}", per_output if scheme.per_channel else [[], [1]])
    if scheme.activations is Activations.FIXED:
        if f"{layer}.{_INPUT_SCALE}" not in checkpoint.names():
            raise bad_model(f"layer {layer} has no input_scale, and its inputs are not quantised dynamically")
        _check_scale(checkpoint, f"{layer}.{_INPUT_SCALE}", [[], [1]])


def _check_scale(checkpoint: Checkpoint, name: str, served: list[list[int]]) -> None:
    if (shape := checkpoint.shape(name)) not in served:
        needed = "one number" if [] in served else "one for each output"
        raise bad_model(f"tensor {name} is {shape}; quantization_config requires {needed}")
    if (dtype := checkpoint.stored_dtype(name)) not in PLAIN_DTYPES:
        raise bad_model(f"tensor {name} is stored as {dtype}, and scales are numbers of 16 bits or more")


def _split(name: str) -> tuple[str, str]:
    """Return a tensor's layer and the last part of its name."""
    layer, _, kind = name.rpartition(".")
    return layer, kind
