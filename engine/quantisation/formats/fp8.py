"""Weights in FP8 of ``quant_method`` "fp8": a scale for each block of rows and columns (DeepSeek-V3), or one for all.

Blocks begin at the first row and column, so those at the lower and right border may be smaller. Despite its name a
``weight_scale_inv`` multiplies.
"""

from typing import TYPE_CHECKING

from engine.models.checkpoint import PLAIN_DTYPES, Checkpoint
from engine.quantisation.scheme import (
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

_STORED = frozenset({"F8_E4M3"})
_SCALES = ("weight_scale_inv", "weight_scale")
_SCALE_DTYPES = PLAIN_DTYPES | {"F8_E8M0"}
_OF_INPUTS = frozenset({"input_scale", "activation_scale"})
_KV_SCALES = (".k_scale", ".v_scale")


class Fp8BlockScheme(Scheme):
    """FP8 weights. block: the rows and columns that share a scale; None: all of a layer do."""

    def __init__(
        self, block: tuple[int, int] | None, has_input_scales: bool, ignored: frozenset[str]
    ) -> None:
        self.block = block
        self._has_input_scales = has_input_scales
        super().__init__(ignored)

    def describe(self) -> str:
        """See Scheme."""
        blocks = "" if self.block is None else f" in blocks of {self.block[0]} x {self.block[1]}"
        return f"FP8{blocks} (fp8)"

    def find(self, checkpoint: Checkpoint) -> dict[str, CodedWeight]:
        """See Scheme."""
        return {
            f"{layer}.weight": self._weight(checkpoint, layer, kinds)
            for layer, kinds in layers_of(checkpoint).items()
            if "weight" in kinds and checkpoint.stored_dtype(f"{layer}.weight") in _STORED
        }

    def is_unused(self, name: str) -> bool:
        """See Scheme. KV is never FP8 here, so its scales are not used."""
        return name.endswith(_KV_SCALES)

    def _weight(self, checkpoint: Checkpoint, layer: str, kinds: set[str]) -> CodedWeight:
        shape = matrix_shape(checkpoint, f"{layer}.weight")
        scale = next((each for each in _SCALES if each in kinds), _SCALES[0])
        shapes: list[list[int]] = [[1], []]
        if self.block is not None:
            shapes = [[ceil_divide(size, each) for size, each in zip(shape, self.block, strict=True)]]
        expect(checkpoint, f"{layer}.{scale}", shapes, _SCALE_DTYPES)
        used = {"weight", scale} | (_OF_INPUTS & kinds if self._has_input_scales else set())
        return _Weight(checkpoint, layer, used, shape, scale, self.block)


class _Weight(CodedWeight):
    """A weight in FP8. scale: the last part of its scale's name."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layer: str,
        kinds: set[str],
        shape: list[int],
        scale: str,
        block: tuple[int, int] | None,
    ) -> None:
        super().__init__(checkpoint, layer, kinds, shape)
        self._scale = scale
        self._block = block

    def rows(self, first: int, end: int) -> "Tensor":
        """See CodedWeight."""
        import torch

        from engine.quantisation.numbers import group_of_input, scaled

        scale = self._finite(self._scale, self._stored(self._scale))
        codes = self._stored("weight")[first:end]
        if self._block is None:
            return scaled(codes, scale.reshape(1, 1), None, None)
        of_row = torch.arange(first, end) // self._block[0]
        return scaled(codes, scale[of_row], None, group_of_input(self.shape[1], self._block[1]))


def read(config: Fields) -> Fp8BlockScheme:
    """Return the scheme of a ``quantization_config``. Raises SettingError for one that is not served."""
    config.require("fmt", "e4m3", None)
    config.require("scale_fmt", "ue8m0", "float", None)
    activations = config.require("activation_scheme", "dynamic", "static", None)
    has_blocks = config.values.get("weight_block_size") is not None
    block = config.block("weight_block_size") if has_blocks else None
    ignored = config.names("modules_to_not_convert") | config.names("ignored_layers")
    return Fp8BlockScheme(block, activations == "static", ignored)
