"""A checkpoint with FP8 weights, as a model reads it: each layer's weight in FP8 with a scale, or converted.

Which layers are quantised is decided by what is stored: a weight in FP8 and its scale. Anything else that is stored in few
bits is refused by name.
"""

import torch
from torch import Tensor

from contract.errors import SettingError
from engine.fp8.scheme import Activations, Fp8Scheme
from engine.models.checkpoint import PLAIN_DTYPES, Checkpoint, TensorPart, bad_model

STORED = "F8_E4M3"
_WEIGHT = ".weight"
_SCALE = ".weight_scale"
_INPUT_SCALE = ".input_scale"
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
        stored = checkpoint.names()
        self.layers = frozenset(
            name.removesuffix(_SCALE)
            for name in stored
            if name.endswith(_SCALE) and name.removesuffix(_SCALE) + _WEIGHT in stored
        )
        hidden = {layer + _SCALE for layer in self.layers}
        if scheme.activations is Activations.FIXED:
            hidden |= {layer + _INPUT_SCALE for layer in self.layers}
        if scheme.has_kv_scales:
            hidden |= {name for name in stored if name.endswith(_KV_SCALES)}
        self._plain_names = stored - hidden
        self._check()

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        scales = {layer + _SCALE for layer in self.multiplied}
        if self.scheme.activations is Activations.FIXED:
            scales |= {layer + _INPUT_SCALE for layer in self.multiplied}
        return self._plain_names | scales

    def stored_dtype(self, name: str) -> str:
        """Return the dtype of what ``tensor`` returns, as safetensors names it."""
        layer, _, kind = name.rpartition(".")
        if layer not in self.layers:
            return self._checkpoint.stored_dtype(name)
        return STORED if f".{kind}" == _WEIGHT and layer in self.multiplied else "F32"

    def shape(self, name: str) -> list[int]:
        """Return the tensor's shape."""
        layer, _, kind = name.rpartition(".")
        if layer not in self.layers or f".{kind}" not in (_SCALE, _INPUT_SCALE):
            return self._checkpoint.shape(name)
        return [1] if f".{kind}" == _INPUT_SCALE else [self._checkpoint.shape(layer + _WEIGHT)[0], 1]

    def tensor(self, name: str) -> Tensor:
        """Return the tensor on the host."""
        return self._read(name, None)

    def part(self, name: str, part: TensorPart) -> Tensor:
        """Return a part of the tensor on the host; of a weight, only the bytes of that part are read."""
        return self._read(name, part)

    def first_dtype(self) -> torch.dtype:
        """Return the dtype of the tensor whose name sorts first among those that are not quantised."""
        plain = [name for name in self._plain_names if name.removesuffix(_WEIGHT) not in self.layers]
        return self._checkpoint.tensor(min(plain)).dtype if plain else torch.float32

    def _read(self, name: str, part: TensorPart | None) -> Tensor:
        layer, _, kind = name.rpartition(".")
        if layer not in self.layers or f".{kind}" not in (_WEIGHT, _SCALE, _INPUT_SCALE):
            return self._stored(name, part)
        if f".{kind}" == _INPUT_SCALE:
            return self._scale(name).view(1)
        if f".{kind}" == _SCALE:
            return self._weight_scale(layer, part)
        weight = self._stored(name, part)
        if layer in self.multiplied:
            return weight
        rows = part if part is not None and part.dim == 0 else None
        return weight.float().mul_(self._weight_scale(layer, rows))

    def _weight_scale(self, layer: str, part: TensorPart | None) -> Tensor:
        """Return the scale of each row, ``[num_rows, 1]``, of the layer or of a part of its rows."""
        num_rows = self._checkpoint.shape(layer + _WEIGHT)[0]
        whole = self._scale(layer + _SCALE).reshape(-1, 1).expand(num_rows, 1)
        return (whole if part is None else whole[part.of(num_rows)]).contiguous()

    def _scale(self, name: str) -> Tensor:
        scale = self._checkpoint.tensor(name).float()
        if not bool((scale.isfinite() & (scale >= 0)).all()):
            raise bad_model(f"tensor {name} has values that are no scales (negative, or not finite)")
        return scale

    def _stored(self, name: str, part: TensorPart | None) -> Tensor:
        return self._checkpoint.tensor(name) if part is None else self._checkpoint.part(name, part)

    def _check(self) -> None:
        if not self.layers:
            raise bad_model(
                "config.json has a quantization_config, and no weight in the checkpoint has a scale"
            )
        for layer in sorted(self.layers):
            self._check_layer(layer)
        for name in sorted(self._plain_names):
            dtype = self._checkpoint.stored_dtype(name)
            if dtype.startswith("F8") and name.removesuffix(_WEIGHT) not in self.layers:
                raise bad_model(f"tensor {name} is stored as {dtype} without a weight_scale")

    def _check_layer(self, layer: str) -> None:
        weight = layer + _WEIGHT
        if layer in self.scheme.ignored:
            raise bad_model(f"layer {layer} has a weight_scale, and quantization_config.ignore names it")
        if (dtype := self._checkpoint.stored_dtype(weight)) != STORED:
            raise bad_model(
                f"tensor {weight} has a weight_scale and is stored as {dtype}; only {STORED} is served"
            )
        shape = self._checkpoint.shape(weight)
        served = [[shape[0], 1], [shape[0]]] if self.scheme.per_channel else [[], [1]]
        if len(shape) != 2 or self._checkpoint.shape(layer + _SCALE) not in served:
            raise self._misshapen(
                layer + _SCALE, "one for each output" if self.scheme.per_channel else "one number"
            )
        if self.scheme.activations is Activations.FIXED:
            if layer + _INPUT_SCALE not in self._checkpoint.names():
                raise bad_model(
                    f"layer {layer} has no input_scale, and its inputs are not quantised dynamically"
                )
            if self._checkpoint.shape(layer + _INPUT_SCALE) not in ([], [1]):
                raise self._misshapen(layer + _INPUT_SCALE, "one number")
        for name in (layer + _SCALE, layer + _INPUT_SCALE):
            if name in self._checkpoint.names() and self._checkpoint.stored_dtype(name) not in PLAIN_DTYPES:
                raise bad_model(f"tensor {name} is stored as {self._checkpoint.stored_dtype(name)}")

    def _misshapen(self, name: str, needed: str) -> SettingError:
        return bad_model(
            f"tensor {name} is {self._checkpoint.shape(name)}; quantization_config requires {needed}"
        )
