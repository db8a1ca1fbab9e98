"""FP8 weights of compressed-tensors that can be multiplied as FP8: a scale for each output or layer, in one group.

``engine.quantisation.formats.compressed_tensors`` reads it; every other form of FP8 is dequantised at load.
"""

from dataclasses import dataclass
from enum import Enum, auto


class Activations(Enum):
    """The scale of a product's input. TOKEN: one for each token, when it is computed. FIXED: stored. NONE: not quantised."""

    TOKEN = auto()
    FIXED = auto()
    NONE = auto()


@dataclass(frozen=True)
class Fp8Scheme:
    """FP8 weights (e4m3) of linear layers.

    per_channel: a scale for each output; otherwise one for each layer. ignored: names of layers that are not quantised,
    without patterns. has_kv_scales: the checkpoint has scales for a KV cache in FP8, which are not used.
    """

    per_channel: bool
    activations: Activations
    ignored: frozenset[str]
    has_kv_scales: bool
