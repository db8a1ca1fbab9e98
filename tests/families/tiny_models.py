"""Tiny random models of the families of the installed transformers, made from the defaults of their configurations.

A class that needs more than small sizes has a row in ``_OF_FAMILY``.
"""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.checkpoints import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

_MAX_PARAMETERS = 20_000_000
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": 6,
    "attention_chunk_size": 10,
    "floor_scale": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "tie_word_embeddings": False,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 64,
    "text_hidden_size": 64,
}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_HALF_MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 2],
        "partial_rotary_factor": 0.5,
    }
}
_WITH_MROPE = "glm46v glm4v glm_ocr glmga paddleocr_vl qwen2_5_omni_thinker qwen2_5_vl qwen2_vl".split()
_PADDING_WITHIN = {"pad_token_id": 1}
_SHORT_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
_LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_WITH_LINEAR_ATTENTION = "qwen3_5 qwen3_5_moe minicpm_ocr minicpmv4_6 minicpmv4_7".split()
_MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
_ONE_SHAPE = {"num_key_value_heads": 4}
_LATENT = {
    **_ONE_SHAPE,
    "kv_lora_rank": 24,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_DELTA_AND_LATENT = {
    **_LATENT,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
}
_SMALL_VQ = {
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
    "projection_dim": 64,
    "image_token_embed_dim": 64,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_COMPASS_ROPE = {
    "rope_parameters": {
        kind: {**_ROPE, "mrope_section": [2, 3, 3]} for kind in ("full_attention", "sliding_attention")
    }
}
_EVERY_OTHER = ["sliding_attention", "full_attention"] * 2
_GEMMA3N = {
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "laurel_rank": 8,
    "layer_types": _EVERY_OTHER,
}
_GEMMA4 = {
    "global_head_dim": 32,
    "layer_types": _EVERY_OTHER,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
}
_OF_FAMILY: Mapping[str, dict[str, Any]] = {
    **{family: {"text_config": _MROPE} for family in _WITH_MROPE},
    "glm4v_moe": {"text_config": _HALF_MROPE},
    **dict.fromkeys(
        (
            "camembert",
            "data2vec-text",
            "roberta",
            "roberta-prelayernorm",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
            "prophetnet",
        ),
        _PADDING_WITHIN,
    ),
    **dict.fromkeys(
        (
            "axk1",
            "deepseek_v2",
            "deepseek_v3",
            "glm4_moe_lite",
            "longcat_flash",
            "minicpm3",
            "mistral4",
            "youtu",
        ),
        _LATENT,
    ),
    "kimi_k25": {"text_config": _LATENT},
    "llama4": {
        "vision_config": {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64}
    },
    **{family: {"rotary_dim": 8} for family in ("codegen", "gptj")},
    "dots1": {"n_shared_experts": 1},
    **{
        family: {
            "text_config": _GEMMA4,
            "image_token_id": PAD_ID,
            "video_token_id": PAD_ID,
            "audio_token_id": PAD_ID,
        }
        for family in ("gemma4", "gemma4_unified")
    },
    "gemma3n": {"text_config": _GEMMA3N},
    "gemma3n_text": _GEMMA3N,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "mimo_v2_flash": {"v_head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "perception_lm": {
        "vision_config": {**_VISION, "model_type": "siglip_vision_model", "model_args": {"embed_dim": 32}}
    },
    **{
        family: {"text_config": _MROPE, "vision_start_token_id": PAD_ID}
        for family in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
    },
    "t5gemma2": {"decoder": {"hidden_size": 64, "vocab_size": VOCAB_SIZE}},
    "zaya": {"num_experts_per_tok": 1},
    # As they are published; without layer types, all layers of theirs are attention.
    "lfm2": _SHORT_CONVOLUTIONS,
    "lfm2_moe": _SHORT_CONVOLUTIONS,
    "lfm2_vl": {"text_config": _SHORT_CONVOLUTIONS},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), _LINEAR_ATTENTION),
    **{family: {"text_config": _LINEAR_ATTENTION} for family in _WITH_LINEAR_ATTENTION},
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), _DELTA_AND_LATENT),
    "bamba": {**_MAMBA_2, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {**_MAMBA_2, "layer_types": ["linear_attention", "full_attention"] * 2},
    "falcon_h1": {**_MAMBA_2, "mamba_d_ssm": 128},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "chameleon": {"vocabulary_map": {"<image>": 5}, "vq_config": _SMALL_VQ},
    "cohere_compass": {"text_config": _COMPASS_ROPE},
    "cohere_compass_text": _COMPASS_ROPE,
    "cosmos3_edge": {"text_config": _MROPE},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", *["sparse"] * 3], "num_key_value_heads": 4}
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32},
    },
    "dots3_note": {
        "text_config": _LATENT,
        "vision_config": {"mlp_layer_types": ["dense"], "adapter_in_dim": 32, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 64},
    },
    "dots3_note_text": _LATENT,
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6}, "vq_config": _SMALL_VQ},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}}},
    # Their own parts for images need a library that is not installed here.
    "fast_vlm": {"vision_config": {**_VISION, "model_type": "siglip_vision_model"}},
    "florence2": {"vision_config": {"patch_size": [7, 3, 3, 3], "embed_dim": [8] * 4, "num_heads": [2] * 4}},
    "glm5_next": {"text_config": _ONE_SHAPE},
    "granite4_vision": {
        "deepstack_layer_map": [],
        "downsample_rate": "1/2",
        "qformer_config": {"hidden_size": 64, "num_attention_heads": 1},
        "vision_config": {"hidden_size": 64},
    },
    "hunyuan_vl": {"text_config": _MROPE},
    # Its layers divide a patch, factor by factor.
    "inkling_mm_model": {"vision_config": {**_VISION, "patch_size": 4, "num_hidden_layers": 4}},
    "janus": {
        "vision_config": {"projection_dim": 64},
        "vq_config": _SMALL_VQ,
    },
    "longcat_flash": {
        **_LATENT,
        "head_dim": 8,
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "molmo2": {"adapter_config": {"vision_feature_layer": [0]}},
    "muse_spark": {
        "out_hidden_size": 64,
        "projector_hidden_size": 64,
        "audio_config": {"num_hidden_layers": 4, "hidden_sizes": [8] * 4, "out_hidden_size": 64},
    },
    "muse_glimmer": {"out_hidden_size": 64, "projector_hidden_size": 64},
    **{family: {"is_decoder": True} for family in ("bert", "electra", "ernie", "roc_bert")},
}


_ENCODERS = frozenset(
    """bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
    roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod""".split()
)
"""Types made to read a text in both directions, which transformers can also run as decoders."""
_HALVES = frozenset(
    """bart bigbird_pegasus blenderbot blenderbot-small gemma4_assistant gemma4_unified_assistant marian mbart musicgen
    musicgen_melody mvp pegasus plbart prophetnet trocr whisper""".split()
)
"""Types whose decoder needs an encoder, or another model."""
WRONG_WITH_A_CACHE = frozenset({"moshi", "qwen3_omni_moe_thinker"})
"""Types whose generate with a cache differs from their own forward pass."""
# Of types whose own defaults are refused by their classes.
_WHOLE: Mapping[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    "nemotron_h_omni": {
        "text_config": {"model_type": "nemotron_h"},
        "vision_config": {"model_type": "radio", "video_temporal_patch_size": 2},
    },
}


def families() -> list[str]:
    """Return the model_types of all decoders and of all composites with images, sorted."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def is_text_decoder(family: str) -> bool:
    """Return whether a type is a decoder that takes text alone, as most served models are."""
    is_composite = family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return not (is_composite or family in _ENCODERS | _HALVES) and family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def tiny_config(family: str) -> tuple[Any, Any]:
    """Return a small configuration, with its class in ``architectures``, and that class. Raises whatever these raise."""
    kind = CONFIG_MAPPING[family]
    fields = _WHOLE.get(family) or _shrunk(kind, kind(), _TEXT, _OF_FAMILY.get(family, {}))
    config = kind(**fields)
    composite = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(family, "")
    is_composite = (
        composite.endswith("ForConditionalGeneration") or family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    name = composite if is_composite else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    config.architectures = [name]
    return config, getattr(transformers, name)


def make_tiny(family: str) -> Any:
    """Return a model with the weights that transformers initialises. Raises whatever its classes raise."""
    config, model_class = tiny_config(family)
    with torch.device("meta"):
        size = sum(each.numel() for each in model_class(config).parameters())
    if size > _MAX_PARAMETERS:
        raise ValueError(f"{family} has {size} parameters")
    return model_class(config).eval()


def _shrunk(kind: Any, usual: Any, small: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a small configuration. usual: the one with the defaults. own: what replaces the rest."""
    declared = getattr(kind, "__dataclass_fields__", {})
    fields: dict[str, Any] = {}
    for name, value in small.items():
        real = kind.attribute_map.get(name, name)
        # A list has a number for each layer, and None stands for what another field implies.
        if real in declared and not isinstance(vars(usual).get(real), list | dict):
            fields[real] = value
    for name in kind.sub_configs or ():
        part = getattr(usual, name, None)
        if "model_type" in own.get(name, {}):
            fields[name] = own[name]
        elif part is not None and name in declared:
            sizes = _TEXT if "text" in name else _VISION
            inner = _shrunk(type(part), part, sizes, own.get(name, {}))
            fields[name] = {"model_type": type(part).model_type, **inner}
    return {**fields, **{name: value for name, value in own.items() if name not in (kind.sub_configs or ())}}
