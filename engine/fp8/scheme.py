"""The quantisation that a config.json describes: FP8 weights as compressed-tensors stores them, or none.

Format: https://github.com/vllm-project/compressed-tensors, ``QuantizationConfig``. Everything else is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from contract.errors import SettingError
from engine.models.config import RawConfig, bad_config

_PLACE = "quantization_config"
_FORMAT = "float-quantized"
_STRATEGIES = ("tensor", "channel")
_UNSTRUCTURED = ("dense", None)
_BLOCK_WISE = "block-wise scales are not served"


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


def read_scheme(raw: RawConfig) -> Fp8Scheme | None:
    """Return the scheme in config.json, None without quantisation. Raises SettingError for any other quantisation."""
    config = raw.get(_PLACE)
    if not config:
        return None
    found = _Fields(_PLACE, config)
    found.require("quant_method", "compressed-tensors")
    if config.get("weight_block_size"):
        raise found.refused("weight_block_size", _BLOCK_WISE)
    found.require("format", _FORMAT)
    found.require("quantization_status", "compressed", None)
    if transforms := config.get("transform_config"):
        raise bad_config(f"{_PLACE}.transform_config is {transforms!r:.80}; transforms are not served")
    if sparsity := config.get("sparsity_config"):
        _Fields(f"{_PLACE}.sparsity_config", sparsity).require("format", *_UNSTRUCTURED)
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise found.refused("config_groups", "it must have exactly one group of layers")
    ((name, values),) = groups.items()
    group = _Fields(f"{_PLACE}.config_groups.{name!s:.40}", values)
    group.require("format", _FORMAT, None)
    if group.values.get("output_activations"):
        raise group.refused("output_activations", "quantised outputs are not served")
    weights = _fp8(f"{group.place}.weights", group.values.get("weights"))
    weights.require("strategy", *_STRATEGIES)
    weights.require("dynamic", False, None)
    weights.require("actorder", None, False)
    names = config.get("ignore") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise found.refused("ignore", "it must be a list of names")
    return Fp8Scheme(
        per_channel=bool(weights.values["strategy"] == "channel"),
        activations=_activations(group),
        ignored=frozenset(name for name in names if not name.startswith("re:")),
        has_kv_scales=bool(config.get("kv_cache_scheme")),
    )


class _Fields:
    """A mapping of config.json, and its place there. Raises SettingError if it is no mapping."""

    def __init__(self, place: str, values: Any) -> None:
        if not isinstance(values, Mapping):
            raise bad_config(f"{place} is {values!r:.80}; it must be an object")
        self.place = place
        self.values: Mapping[str, Any] = values

    def require(self, name: str, *served: object) -> None:
        """Raise SettingError unless a field has one of these values; None also stands for a missing field."""
        value = self.values.get(name)
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in served):
            shown = " or ".join(repr(one) for one in served if one is not None)
            raise self.refused(name, f"only {shown or None} is served")

    def refused(self, name: str, why: str) -> SettingError:
        """Return the error for one field."""
        return bad_config(f"{self.place}.{name} is {self.values.get(name)!r:.80}; {why}")


def _fp8(place: str, values: Any) -> _Fields:
    """Return the description of quantised numbers; raise SettingError unless they are FP8."""
    found = _Fields(place, values)
    found.require("type", "float")
    found.require("num_bits", 8)
    if found.values.get("strategy") == "block" or found.values.get("block_structure"):
        raise found.refused("strategy", _BLOCK_WISE)
    found.require("symmetric", True, None)
    found.require("group_size", None)
    return found


def _activations(group: _Fields) -> Activations:
    values = group.values.get("input_activations")
    if values is None:
        return Activations.NONE
    inputs = _fp8(f"{group.place}.input_activations", values)
    inputs.require("dynamic", True, False)
    if inputs.values["dynamic"]:
        inputs.require("strategy", "token")
        return Activations.TOKEN
    inputs.require("strategy", "tensor")
    return Activations.FIXED
