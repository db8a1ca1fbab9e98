"""Tiny seeded checkpoints of the supported model families: weights, configuration and a byte-level tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
PAD_ID, BOS_ID, EOS_ID = 256, 257, 258
VOCAB_SIZE = 264
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}
_CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
_MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.1,
}
"""Sizes of small models with multi-head latent attention: a row of a token has 16 + 8 numbers."""
_FOREIGN: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gemma2": (
        transformers.Gemma2Config,
        transformers.Gemma2ForCausalLM,
        {"sliding_window": 6, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForCausalLM,
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM, {"sliding_window": 9}),
    "phi": (transformers.PhiConfig, transformers.PhiForCausalLM, {}),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM, {}),
    "gpt_neox": (transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM, {}),
    "granite": (
        transformers.GraniteConfig,
        transformers.GraniteForCausalLM,
        {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "attention_multiplier": 0.2},
    ),
    "cohere2": (
        transformers.Cohere2Config,
        transformers.Cohere2ForCausalLM,
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "logit_scale": 0.5},
    ),
    "starcoder2": (transformers.Starcoder2Config, transformers.Starcoder2ForCausalLM, {}),
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel, {}),
    "opt": (
        transformers.OPTConfig,
        transformers.OPTForCausalLM,
        {"ffn_dim": 96, "word_embed_proj_dim": 64},
    ),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM, {"num_local_experts": 4}),
    "gpt_oss": (
        transformers.GptOssConfig,
        transformers.GptOssForCausalLM,
        {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": None},
    ),
    # The second layer sees everything, without positions; its queries grow with theirs.
    "llama4": (
        transformers.Llama4TextConfig,
        transformers.Llama4ForCausalLM,
        {
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "attention_chunk_size": 10,
            "floor_scale": 8,
            "no_rope_layers": [1, 0],
        },
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM, _MLA),
    # A value has the size of a key, so a model could be taken for one with keys and values.
    "glm4_moe_lite": (
        transformers.Glm4MoeLiteConfig,
        transformers.Glm4MoeLiteForCausalLM,
        {**_MLA, "v_head_dim": 20},
    ),
    "mistral4": (
        transformers.Mistral4Config,
        transformers.Mistral4ForCausalLM,
        {**_MLA, "q_lora_rank": None, "head_dim": 20, "rope_parameters": _YARN},
    ),
}
FOREIGN_FAMILIES = tuple(_FOREIGN)
"""Decoders without an implementation of ours: transformers computes them."""


def make_foreign_checkpoint(
    folder: Path, family: str, seed: int = 0, *, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """Write a checkpoint as ``make_checkpoint`` does, of one of FOREIGN_FAMILIES."""
    config_class, model_class, fields = _FOREIGN[family]
    config = config_class(**{**_SHAPE, **fields, **overrides})
    return write_checkpoint(folder, model_class(config), seed, dtype)


def make_checkpoint(
    folder: Path,
    family: str = "llama",
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | None = None,
    is_bare: bool = False,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of ``family`` that transformers and the engine can both read; return ``folder``.

    family: one of FAMILIES. Equal seeds give equal bytes. overrides: fields of the transformers configuration.
    max_shard_size: see ``save_pretrained``; "40KB" gives several shards with an index. is_bare: save the decoder alone, as
    embedding models are published (names without "model.", no head, architecture "...Model"). The weights are larger than
    those of a fresh model, so that the best two logits are far apart and greedy answers vary.
    """
    config_class, model_class = _CLASSES[family]
    model = model_class(config_class(**{**_SHAPE, **overrides}))
    return write_checkpoint(folder, model, seed, dtype, max_shard_size, is_bare)


def write_checkpoint(
    folder: Path,
    model: Any,
    seed: int,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | None = None,
    is_bare: bool = False,
) -> Path:
    """Give ``model`` random weights and write it, with a tokenizer beside it; see ``make_checkpoint``."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random_weights(name, tuple(parameter.shape), generator))
    model = model.to(dtype)
    model.generation_config = _generation_config(
        bos_token_id=BOS_ID,
        eos_token_id=[EOS_ID, SPECIAL_TOKENS.index("<|im_end|>") + 256],
        pad_token_id=PAD_ID,
    )
    sharding = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    (model.model if is_bare else model).save_pretrained(folder, **sharding)
    make_tokenizer(folder)
    return folder


def write_modules(folder: Path, mode: str = "lasttoken", *further: str) -> None:
    """Write the files of sentence-transformers: the modules, with any ``further`` ones at the end, and the pooling mode."""
    names = ["Transformer", "Pooling", *further]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{name}" if i else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for i, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{each}": each == mode for each in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))


def replace_weights(folder: Path, seed: int, **overrides: Any) -> None:
    """Write the files of other weights beside a folder and rename them into it: the old ones may be mapped to memory."""
    made = make_checkpoint(folder.parent / f"{folder.name}-{seed}", seed=seed, **overrides)
    for file in made.iterdir():
        file.rename(folder / file.name)


def load_reference(folder: Path) -> Any:
    """Load the checkpoint with transformers in float32, for comparisons."""
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    model: Any = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def reference_greedy(model: Any, prompt: list[int], num_tokens: int, use_cache: bool = True) -> list[int]:
    """Return the next ``num_tokens`` tokens of transformers' own greedy ``generate``, end tokens ignored."""
    ids = torch.tensor([prompt])
    settings = _generation_config(
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=PAD_ID,
        use_cache=use_cache,
    )
    model.generation_config = _generation_config(eos_token_id=None)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


def _generation_config(**fields: Any) -> Any:
    config_class: Any = transformers.GenerationConfig
    return config_class(**fields)


def make_tokenizer(folder: Path) -> None:
    """Write tokenizer.json (ids 0..255 are the bytes, then the special tokens) and its configuration."""
    vocabulary = {character: byte for byte, character in _byte_characters().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration, indent=1))


def _byte_characters() -> dict[int, str]:
    """Return the printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in table]
    return table | {byte: chr(256 + index) for index, byte in enumerate(others)}


def _random_weights(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return noise if "embed_tokens" in name else noise * shape[-1] ** -0.5 * 1.5
    return 0.2 * noise if name.endswith("bias") else 1.0 + 0.2 * noise
