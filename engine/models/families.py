"""Translate each family's config.json into the configuration of ``engine.models.decoder``.

A missing field takes transformers' default, so that both read a checkpoint in the same way.
"""

from typing import Any

from engine.models.config import (
    MAX_LAYERS,
    DecoderConfig,
    Head,
    RawConfig,
    bad_config,
    flag,
    positive_float,
    positive_int,
)
from engine.models.registry import Shapes
from engine.models.rope_parsing import rope_config

_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28
_QWEN3_HEAD_DIM = 128
_LAYER_TYPES = ("full_attention", "sliding_attention")


def llama(raw: RawConfig) -> DecoderConfig:
    """Read Llama 1 to 3: optional biases, every layer sees the whole sequence."""
    bias = flag(raw, "attention_bias")
    return DecoderConfig(
        **shared_fields(raw),
        sliding_windows=(None,) * _num_layers(raw),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=flag(raw, "mlp_bias"),
    )


def mistral(raw: RawConfig) -> DecoderConfig:
    """Read Mistral: no biases; one sliding window for all layers (null disables it, a missing field is 4096)."""
    window = raw.get("sliding_window", _DEFAULT_WINDOW)
    windows = (None if window is None else positive_int(raw, "sliding_window", _DEFAULT_WINDOW),)
    return DecoderConfig(**shared_fields(raw), sliding_windows=windows * _num_layers(raw))


def qwen2(raw: RawConfig) -> DecoderConfig:
    """Read Qwen2: biases on q, k and v; with ``use_sliding_window`` a window on the upper layers."""
    return DecoderConfig(**shared_fields(raw), sliding_windows=_qwen_windows(raw), qkv_bias=True)


def qwen3(raw: RawConfig) -> DecoderConfig:
    """Read Qwen3: RMSNorm on each head's query and key, and an explicit head_dim."""
    shape = shared_fields(raw) | {"head_dim": positive_int(raw, "head_dim", _QWEN3_HEAD_DIM)}
    bias = flag(raw, "attention_bias")
    return DecoderConfig(
        **shape, sliding_windows=_qwen_windows(raw), qkv_bias=bias, output_bias=bias, qk_norm=True
    )


def _num_layers(raw: RawConfig) -> int:
    return positive_int(raw, "num_hidden_layers", limit=MAX_LAYERS)


def shared_fields(raw: RawConfig) -> dict[str, Any]:
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
        "mlp.gate_proj": (config.intermediate_size, width),
        "mlp.up_proj": (config.intermediate_size, width),
        "mlp.down_proj": (width, config.intermediate_size),
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
        shapes |= {f"{place}.{name}.weight": shape for name, shape in of_layer.items()}
        shapes |= {
            f"{place}.{name}.bias": of_layer[name][:1] for name, has_bias in biased.items() if has_bias
        }
    shapes["model.norm.weight"] = (width,)
    if head is Head.OWN:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    return shapes
