"""Checkpoints whose answers are known texts: the next token depends on the newest one alone, and layers cost what they cost.

Layers are random and add almost nothing; the output head maps each token to its successors. So an answer walks through a
graph of tokens. One that begins inside a passage of its prompt repeats that passage, with or without deviations.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import EOS_ID, make_checkpoint

# Logits of a token without successors are about normal with this deviation, and the best successor's is 24 of them.
_BEST_LOGIT = 24.0


def make_copying_checkpoint(
    folder: Path, successors: Sequence[Sequence[int]], weights: Sequence[Sequence[float]], **changes: Any
) -> Path:
    """Write a Llama in which ``successors[t]`` follow token t; return the folder.

    weights: their logits, as parts of the best one's. changes: of the shape, see ``make_checkpoint``.
    """
    make_checkpoint(folder, "llama", vocab_size=len(successors), **changes)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    generator = torch.Generator().manual_seed(7)
    vectors = torch.randn(embedding.shape, generator=generator)
    vectors /= vectors.norm(dim=1, keepdim=True)
    head = torch.zeros_like(vectors)
    for token, (following, parts) in enumerate(zip(successors, weights, strict=True)):
        for successor, part in zip(following, parts, strict=True):
            head[successor] += part * vectors[token]
    # After the norm, a state has the length of the root of its size.
    head *= _BEST_LOGIT / vectors.shape[1] ** 0.5
    head[EOS_ID] = 0.0
    tensors["model.embed_tokens.weight"] = vectors.to(embedding.dtype)
    tensors["lm_head.weight"] = head.to(embedding.dtype)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = tensor * 0.002
    save_file(tensors, path, metadata={"format": "pt"})
    return folder
