"""Writes a checkpoint with random weights in a given shape."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.gpu_shapes import ModelShape
from benchmarks.gpu_steps import RandomModel
from tests.checkpoints import BOS_ID, EOS_ID, make_tokenizer


def write_checkpoint(folder: Path, shape: ModelShape, max_length: int, device: torch.device) -> None:
    """Write bfloat16 weights made on ``device``, and the tests' tokenizer. The biases of q, k and v make it a Qwen2."""
    model = RandomModel(shape, device, max_length).model
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kind = ("qwen2", "Qwen2ForCausalLM") if shape.has_qkv_bias else ("llama", "LlamaForCausalLM")
    config = {
        "model_type": kind[0],
        "architectures": [kind[1]],
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": max_length,
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.is_tied,
        "torch_dtype": "bfloat16",
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }
    (folder / "config.json").write_text(json.dumps(config))
    make_tokenizer(folder)
