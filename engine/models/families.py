"""Translate each family's config.json into the configuration of ``engine.models.decoder``.

A missing field takes transformers' default, so that both read a checkpoint in the same way.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import (
    MAX_LAYERS,
    DecoderConfig,
    Experts,
    Head,
    OtherRopeError,
    RawConfig,
    RopeConfig,
    bad_config,
    flag,
    positive_float,
    positive_int,
)
from engine.models.registry import Shapes

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
_DEFAULT_THETA = 10000.0
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28
_QWEN3_HEAD_DIM = 128
_QWEN3_EXPERTS = 128
_QWEN3_ACTIVE_EXPERTS = 8
_QWEN3_EXPERT_WIDTH = 768
# Experts are objects of their own, made before their weights are looked for; models have 512 of them at most.
_MAX_EXPERTS = 4096
_LAYER_TYPES = ("full_attention", "sliding_attention")


def rope_config(raw: RawConfig) -> RopeConfig:
    """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` with ``rope_scaling`` (before it).

    Raises OtherRopeError for a rope type that is not in ROPE_TYPES, for parameters that differ by layer, and for angles of
    a part of a head.
    """
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise bad_config(f"the rope parameters are {parameters!r}; they must be an object")
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise _other_rope(
            f"rope type {rope_type!r} is not served; the served ones are {', '.join(ROPE_TYPES)}"
        )
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise _other_rope("rope parameters that differ by layer type are not served")
    if parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise _other_rope("partial_rotary_factor below 1 is not served")
    theta = positive_float(parameters, "rope_theta", positive_float(raw, "rope_theta", _DEFAULT_THETA))
    if rope_type == "default":
        return RopeConfig(rope_type, theta)
    num_positions = positive_int(raw, "max_position_embeddings")
    if rope_type in ("linear", "dynamic"):
        factor = positive_float(parameters, "factor")
        return RopeConfig(rope_type, theta, factor, original_max_position_embeddings=num_positions)
    name = "original_max_position_embeddings"
    original = positive_int(raw, name, positive_int(parameters, name, num_positions))
    if rope_type == "yarn":
        return _yarn(parameters, theta, original)
    if rope_type == "longrope":
        return _longrope(raw, parameters, theta, original, num_positions)
    factor = positive_float(parameters, "factor")
    low = positive_float(parameters, "low_freq_factor")
    high = positive_float(parameters, "high_freq_factor")
    if low >= high:
        raise bad_config(f"low_freq_factor is {low}; it must be below high_freq_factor ({high})")
    return RopeConfig("llama3", theta, factor, low, high, original)


def _other_rope(what: str) -> OtherRopeError:
    return OtherRopeError(f"the model's config.json: {what}", param="model")


def _yarn(parameters: RawConfig, theta: float, original: int) -> RopeConfig:
    """Read yarn; without ``attention_factor`` it follows from the factor, or from mscale and mscale_all_dim."""
    factor = positive_float(parameters, "factor")
    attention = parameters.get("attention_factor")
    if attention is not None:
        scaling = positive_float(parameters, "attention_factor")
    elif parameters.get("mscale") and parameters.get("mscale_all_dim"):
        scales = [_mscale(factor, positive_float(parameters, name)) for name in ("mscale", "mscale_all_dim")]
        scaling = scales[0] / scales[1]
    else:
        scaling = _mscale(factor, 1.0)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original_max_position_embeddings=original,
        attention_factor=scaling,
        beta_fast=positive_float(parameters, "beta_fast", 32.0),
        beta_slow=positive_float(parameters, "beta_slow", 1.0),
        truncate=parameters.get("truncate") is None or flag(parameters, "truncate"),
    )


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(
    raw: RawConfig, parameters: RawConfig, theta: float, original: int, num_positions: int
) -> RopeConfig:
    """Read longrope: a factor for every frequency, of short and of long contexts."""
    factor = positive_float(parameters, "factor", num_positions / original)
    growth = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    head_dim = positive_int(
        raw, "head_dim", positive_int(raw, "hidden_size") // positive_int(raw, "num_attention_heads")
    )
    factors = []
    for name in ("short_factor", "long_factor"):
        given = parameters.get(name)
        if not isinstance(given, list) or len(given) != head_dim // 2:
            raise bad_config(f"{name} must be a list of {head_dim // 2} numbers, one of each frequency")
        factors.append(tuple(positive_float({name: each}, name) for each in given))
    return RopeConfig(
        "longrope",
        theta,
        factor,
        original_max_position_embeddings=original,
        attention_factor=positive_float(parameters, "attention_factor", growth),
        short_factors=factors[0],
        long_factors=factors[1],
    )


def llama(raw: RawConfig) -> DecoderConfig:
    """Read Llama 1 to 3: optional biases, every layer sees the whole sequence."""
    bias = flag(raw, "attention_bias")
    return DecoderConfig(
        **read_shared_fields(raw),
        sliding_windows=(None,) * _num_layers(raw),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=flag(raw, "mlp_bias"),
    )


def mistral(raw: RawConfig) -> DecoderConfig:
    """Read Mistral: no biases; one sliding window for all layers (null disables it, a missing field is 4096)."""
    window = raw.get("sliding_window", _DEFAULT_WINDOW)
    windows = (None if window is None else positive_int(raw, "sliding_window", _DEFAULT_WINDOW),)
    return DecoderConfig(**read_shared_fields(raw), sliding_windows=windows * _num_layers(raw))


def qwen2(raw: RawConfig) -> DecoderConfig:
    """Read Qwen2: biases on q, k and v; with ``use_sliding_window`` a window on the upper layers."""
    return DecoderConfig(**read_shared_fields(raw), sliding_windows=_qwen_windows(raw), qkv_bias=True)


def qwen3(raw: RawConfig) -> DecoderConfig:
    """Read Qwen3: RMSNorm on each head's query and key, and an explicit head_dim."""
    shape = read_shared_fields(raw) | {"head_dim": positive_int(raw, "head_dim", _QWEN3_HEAD_DIM)}
    bias = flag(raw, "attention_bias")
    return DecoderConfig(
        **shape, sliding_windows=_qwen_windows(raw), qkv_bias=bias, output_bias=bias, qk_norm=True
    )


def qwen3_moe(raw: RawConfig) -> DecoderConfig:
    """Read Qwen3-MoE: Qwen3 with experts on every ``decoder_sparse_step``-th layer that is not in ``mlp_only_layers``."""
    step = positive_int(raw, "decoder_sparse_step", 1)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise bad_config(f"mlp_only_layers is {dense!r:.80}; it must be a list of layers")
    experts = Experts(
        # transformers 5 writes the second name, and published checkpoints have the first one.
        num=positive_int(
            raw, "num_experts", positive_int(raw, "num_local_experts", _QWEN3_EXPERTS), _MAX_EXPERTS
        ),
        num_active=positive_int(raw, "num_experts_per_tok", _QWEN3_ACTIVE_EXPERTS),
        width=positive_int(raw, "moe_intermediate_size", _QWEN3_EXPERT_WIDTH),
        normalises=flag(raw, "norm_topk_prob"),
    )
    layers = range(_num_layers(raw))
    sparse = frozenset(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)
    # Its head_dim, unlike that of Qwen3, follows from the other sizes if it is missing.
    attention = replace(qwen3(raw), head_dim=read_shared_fields(raw)["head_dim"])
    return replace(attention, experts=experts, sparse_layers=sparse)


def _num_layers(raw: RawConfig) -> int:
    return positive_int(raw, "num_hidden_layers", limit=MAX_LAYERS)


def read_shared_fields(raw: RawConfig) -> dict[str, Any]:
    """Read the fields that all families share, as arguments of DecoderConfig. Raises SettingError."""
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise bad_config(f"hidden_act is {activation!r}; only 'silu' is served")
    if raw.get("is_causal") is False:
        raise bad_config("is_causal is false; attention to later tokens is not served by this version")
    hidden_size = positive_int(raw, "hidden_size")
    num_heads = positive_int(raw, "num_attention_heads")
    return {
        "vocab_size": positive_int(raw, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": positive_int(raw, "intermediate_size"),
        "num_layers": _num_layers(raw),
        "num_heads": num_heads,
        "num_kv_heads": positive_int(raw, "num_key_value_heads", num_heads),
        "head_dim": positive_int(raw, "head_dim", max(1, hidden_size // num_heads)),
        "max_position_embeddings": positive_int(raw, "max_position_embeddings"),
        "rms_norm_eps": positive_float(raw, "rms_norm_eps", 1e-6),
        "rope": rope_config(raw),
        "tie_word_embeddings": flag(raw, "tie_word_embeddings"),
    }


def _qwen_windows(raw: RawConfig) -> tuple[int | None, ...]:
    """Return each layer's window: by ``layer_types``, else on the layers from ``max_window_layers`` on."""
    num_layers = _num_layers(raw)
    window = None
    if flag(raw, "use_sliding_window") and raw.get("sliding_window", _DEFAULT_WINDOW) is not None:
        window = positive_int(raw, "sliding_window", _DEFAULT_WINDOW)
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = raw.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise bad_config(f"max_window_layers is {first!r}; it must be a whole number, 0 or more")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise bad_config(f"layer_types must name one type for each of the {num_layers} layers")
    if unknown := sorted({str(name) for name in layer_types} - set(_LAYER_TYPES)):
        raise bad_config(
            f"layer type {unknown[0]!r} is not served; the served ones are {', '.join(_LAYER_TYPES)}"
        )
    return tuple(window if name == "sliding_attention" else None for name in layer_types)


def decoder_tensors(config: DecoderConfig, head: Head) -> Shapes:
    """Return the tensors of a checkpoint of ``engine.models.decoder``, by name, with the shape of each."""
    width = config.hidden_size
    query = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    of_layer = {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_proj": (query, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, query),
    }
    if config.qk_norm:
        of_layer |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (config.head_dim,))
    biased = {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), config.qkv_bias),
        "self_attn.o_proj": config.output_bias,
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, width)}
    for layer in range(config.num_layers):
        place = f"model.layers.{layer}"
        weights = of_layer | _mlp_tensors(config, layer)
        shapes |= {f"{place}.{name}.weight": shape for name, shape in weights.items()}
        shapes |= {f"{place}.{name}.bias": weights[name][:1] for name, has_bias in biased.items() if has_bias}
    shapes["model.norm.weight"] = (width,)
    if head is Head.OWN:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    return shapes


def _mlp_tensors(config: DecoderConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the weights of a layer's MLP, or of its router and experts, without their ending."""
    hidden = config.hidden_size
    experts = config.experts_of(layer)
    widths = {"mlp": config.intermediate_size}
    if experts is not None:
        widths = {f"mlp.experts.{index}": experts.width for index in range(experts.num)}
    shapes: dict[str, tuple[int, ...]] = {} if experts is None else {"mlp.gate": (experts.num, hidden)}
    for place, width in widths.items():
        shapes |= {f"{place}.{name}_proj": (width, hidden) for name in ("gate", "up")}
        shapes[f"{place}.down_proj"] = (hidden, width)
    return shapes
