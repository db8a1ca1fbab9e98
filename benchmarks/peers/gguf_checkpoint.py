"""Writes a Qwen2 checkpoint (bfloat16, with a byte-level tokenizer.json) as a GGUF file in bfloat16, for llama.cpp."""

import json
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_LAYER_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(model: Path, target: Path) -> None:
    """Write ``target`` atomically. Raises ValueError for another family or dtype."""
    import gguf

    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "qwen2":
        raise ValueError(f"{model} is a {config['model_type']} model; only qwen2 can be written as GGUF")
    target.parent.mkdir(parents=True, exist_ok=True)
    unready = target.with_suffix(".new")
    writer = gguf.GGUFWriter(str(unready), "qwen2")
    _write_config(writer, config)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    _write_tokenizer(writer, json.loads((model / "tokenizer.json").read_text()), config, gguf.TokenType)
    for file in sorted(model.glob("*.safetensors")):
        for name, values in _tensors(file):
            if values.ndim == 1:  # norms and biases are float32 in GGUF
                writer.add_tensor(_renamed(name), (values.astype(np.uint32) << 16).view(np.float32))
            else:
                writer.add_tensor(
                    _renamed(name), values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16
                )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unready.replace(target)


def _write_config(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _write_tokenizer(writer: Any, found: dict[str, Any], config: dict[str, Any], kinds: Any) -> None:
    special = {token["id"] for token in found["added_tokens"]}
    names = {number: text for text, number in found["model"]["vocab"].items()}
    names |= {token["id"]: token["content"] for token in found["added_tokens"]}
    ids = range(config["vocab_size"])
    merges = found["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([names.get(number, f"[PAD{number}]") for number in ids])
    writer.add_token_types(
        [
            kinds.CONTROL if number in special else kinds.NORMAL if number in names else kinds.UNUSED
            for number in ids
        ]
    )
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _tensors(file: Path) -> Iterator[tuple[str, "np.ndarray[Any, np.dtype[np.uint16]]"]]:
    """Yield name and bits of every tensor. Raises ValueError if one is not bfloat16."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        (length,) = struct.unpack("<Q", mapped[:8])
        header: dict[str, Any] = json.loads(mapped[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            if tensor["dtype"] != "BF16":
                raise ValueError(f"{name} is {tensor['dtype']}; only BF16 can be written as GGUF")
            begin, end = (8 + length + offset for offset in tensor["data_offsets"])
            yield name, np.frombuffer(mapped[begin:end], dtype=np.uint16).reshape(tensor["shape"])


def _renamed(name: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER_PARTS[part]}.{kind}"
