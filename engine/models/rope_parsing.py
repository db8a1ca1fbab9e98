"""Read a rope configuration in either of its two spellings."""

from collections.abc import Mapping
from typing import Any

from engine.models.config import RawConfig, RopeConfig, bad_config, positive_float, positive_int

ROPE_TYPES = ("default", "linear", "llama3")
_DEFAULT_THETA = 10000.0


def rope_config(raw: RawConfig) -> RopeConfig:
    """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` with ``rope_scaling`` (before it).

    Raises SettingError for a rope type that is not in ROPE_TYPES, and for parameters that differ by layer.
    """
    parameters = _parameters(raw)
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise bad_config(
            f"rope type {rope_type!r} is not served; the served ones are {', '.join(ROPE_TYPES)}"
        )
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise bad_config("rope parameters that differ by layer type are not served")
    if parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise bad_config("partial_rotary_factor below 1 is not served")
    theta = positive_float(parameters, "rope_theta", positive_float(raw, "rope_theta", _DEFAULT_THETA))
    if rope_type == "default":
        return RopeConfig(rope_type, theta)
    factor = positive_float(parameters, "factor")
    if rope_type == "linear":
        return RopeConfig(rope_type, theta, factor)
    return _llama3(raw, parameters, theta, factor)


def _parameters(raw: RawConfig) -> Mapping[str, Any]:
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise bad_config(f"the rope parameters are {parameters!r}; they must be an object")
    return parameters


def _llama3(raw: RawConfig, parameters: Mapping[str, Any], theta: float, factor: float) -> RopeConfig:
    low = positive_float(parameters, "low_freq_factor")
    high = positive_float(parameters, "high_freq_factor")
    if low >= high:
        raise bad_config(f"low_freq_factor is {low}; it must be below high_freq_factor ({high})")
    name = "original_max_position_embeddings"
    nested = positive_int(parameters, name, positive_int(raw, "max_position_embeddings"))
    return RopeConfig("llama3", theta, factor, low, high, positive_int(raw, name, nested))
