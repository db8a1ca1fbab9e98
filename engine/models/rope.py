"""Rotary position embeddings (Su et al. 2021) with the scalings that the served families use."""

import math

import torch
from torch import Tensor

from engine.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the angles per position in radians, float32 ``[head_dim / 2]``; the arithmetic follows transformers."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim))
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        return _llama3_frequencies(rope, plain)
    return plain


def _llama3_frequencies(rope: RopeConfig, plain: Tensor) -> Tensor:
    length = rope.original_max_position_embeddings
    longest = length / rope.low_freq_factor
    shortest = length / rope.high_freq_factor
    wavelengths = 2 * math.pi / plain
    scaled = torch.where(wavelengths > longest, plain / rope.factor, plain)
    smooth = (length / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    is_between = ~(wavelengths < shortest) & ~(wavelengths > longest)
    return torch.where(is_between, blended, scaled)


def rotation(frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position's angles, each ``[num_tokens, 1, head_dim]``: in float32, then cast."""
    angles = positions[:, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys ``[num_tokens, num_heads, head_dim]`` by their positions' angles."""
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin
