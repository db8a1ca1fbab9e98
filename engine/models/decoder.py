"""One decoder for the Llama, Mistral, Qwen2 and Qwen3 families, with its small layers and rotary positions (Su et al. 2021).

The tokens of all requests lie in one flat dimension. Only the attention step maps a token to its request and to the place
of its KV. Numerics follow transformers, so that float32 answers are equal token by token. Every module is built for one
rank: the config has that rank's share of heads and MLP width (``engine.models.sharding``). Names of the parameters are those
of the checkpoints.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contract.errors import InternalError
from engine.attention.backend import AttentionStep, LayerShape, Steps, step_of
from engine.connector import LayerWatch
from engine.distributed.group import RankGroup
from engine.models.config import DecoderConfig, Head, RopeConfig
from engine.models.experts import SparseMLP
from engine.models.language_model import LanguageModel
from engine.models.linear import DenseLinear, LinearOp, Product, row_parallel
from engine.models.sharding import embedding, share_of

Rotation = tuple[Tensor, Tensor]
Stored = Callable[[], None]
"""Called when a layer's KV is written: before its attention, which takes most of its time."""


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the angles per position in radians, float32 ``[head_dim / 2]``; the arithmetic follows transformers.

    Sources: YaRN (Peng et al. 2023); LongRoPE (Ding et al. 2024); "dynamic" is NTK-aware scaling, of which transformers'
    ``modeling_rope_utils`` has the formula.
    """
    theta = rope.theta
    original = rope.original_max_position_embeddings
    if rope.rope_type == "dynamic" and rope.length > original:
        growth = rope.factor * rope.length / original - (rope.factor - 1)
        theta *= growth ** (head_dim / (head_dim - 2))
    # On the host, not on the meta device of a model that is being built: no checkpoint has these numbers.
    powers = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    if rope.rope_type == "longrope":
        divisors = rope.long_factors if rope.length > original else rope.short_factors
        return 1.0 / (torch.tensor(divisors, dtype=torch.float32, device="cpu") * powers)
    plain = 1.0 / powers
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "yarn":
        keeps = 1 - _yarn_ramp(rope, head_dim)
        return 1.0 / (rope.factor * powers) * (1 - keeps) + plain * keeps
    if rope.rope_type != "llama3":
        return plain
    longest = original / rope.low_freq_factor
    shortest = original / rope.high_freq_factor
    wavelengths = 2 * math.pi / plain
    scaled = torch.where(wavelengths > longest, plain / rope.factor, plain)
    smooth = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    is_between = ~(wavelengths < shortest) & ~(wavelengths > longest)
    return torch.where(is_between, blended, scaled)


def _yarn_ramp(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return 0 for the dimensions that keep their frequency, 1 for those that are divided, float32 ``[head_dim / 2]``."""
    length = rope.original_max_position_embeddings
    first, last = (
        head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    dimensions = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    return ((dimensions - first) / (last - first)).clamp(0, 1)


def rotation(
    frequencies: Tensor, positions: Tensor, dtype: torch.dtype, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position's angles, each ``[num_tokens, 1, head_dim]``: in float32, then cast.

    scaling: multiplies both (``RopeConfig.attention_factor``).
    """
    angles = positions[:, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, each ``[num_tokens, num_heads, head_dim]``, by their positions' angles."""
    query_first, query_second = query.chunk(2, dim=-1)
    key_first, key_second = key.chunk(2, dim=-1)
    return (
        query * cos + torch.cat((-query_second, query_first), dim=-1) * sin,
        key * cos + torch.cat((-key_second, key_first), dim=-1) * sin,
    )


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019) over the last dimension, in float32, then cast and weighted."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """Map ``[..., size]`` to the same shape and dtype."""
        wide = states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(states.dtype)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020); ``intermediate_size`` is this rank's."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, group: RankGroup) -> None:
        super().__init__()
        self.gate_proj: LinearOp = DenseLinear(hidden_size, intermediate_size, bias=bias)
        self.up_proj: LinearOp = DenseLinear(hidden_size, intermediate_size, bias=bias)
        self.down_proj: LinearOp = row_parallel(intermediate_size, hidden_size, bias, group)

    def forward(self, states: Tensor) -> Tensor:
        """Map ``[num_tokens, hidden_size]`` to the same shape."""
        return self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions; optional biases, head norms and sliding window."""

    def __init__(self, config: DecoderConfig, layer: int, group: RankGroup) -> None:
        super().__init__()
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.q_proj: LinearOp = DenseLinear(config.hidden_size, query_size, bias=config.qkv_bias)
        self.k_proj: LinearOp = DenseLinear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj: LinearOp = DenseLinear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj: LinearOp = row_parallel(query_size, config.hidden_size, config.output_bias, group)
        norm = config.rms_norm_eps
        self.q_norm = RMSNorm(config.head_dim, norm) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, norm) if config.qk_norm else nn.Identity()
        self.head_dim = config.head_dim
        self.shape = LayerShape(config.head_dim**-0.5, config.sliding_windows[layer])

    def forward(
        self, states: Tensor, turn: Rotation, step: AttentionStep, cache: Tensor | None, stored: Stored | None
    ) -> Tensor:
        """Map ``[num_tokens, hidden_size]`` to the same shape; write the tokens' KV into ``cache``, then call ``stored``."""
        heads = (-1, self.head_dim)
        query = self.q_norm(torch.unflatten(self.q_proj(states), -1, heads))
        key = self.k_norm(torch.unflatten(self.k_proj(states), -1, heads))
        query, key = rotate(query, key, *turn)
        value = torch.unflatten(self.v_proj(states), -1, heads)
        if cache is not None:
            step.store(key, value, cache)
        if stored is not None:
            stored()  # before attention: what is published now leaves while the layer goes on
        mixed = step.attend(self.shape, query, key, value, cache)
        return self.o_proj(mixed.flatten(-2))


class DecoderLayer(nn.Module):
    """Attention, then the MLP, each on a normed input and added to the residual."""

    def __init__(self, config: DecoderConfig, layer: int, group: RankGroup) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer, group)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        experts = config.experts_of(layer)
        self.mlp: GatedMLP | SparseMLP = (
            GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias, group)
            if experts is None
            else SparseMLP(config, experts, group)
        )

    def forward(
        self, states: Tensor, turn: Rotation, step: AttentionStep, cache: Tensor | None, stored: Stored | None
    ) -> Tensor:
        """Map ``[num_tokens, hidden_size]`` to the same shape."""
        states = states + self.self_attn(self.input_layernorm(states), turn, step, cache, stored)
        widened: Tensor = self.mlp(self.post_attention_layernorm(states))
        return states + widened


class Decoder(nn.Module):
    """Embedding, layers and final norm: the part that a checkpoint calls ``model``."""

    def __init__(self, config: DecoderConfig, group: RankGroup) -> None:
        super().__init__()
        self.embed_tokens = embedding(config.vocab_size, config.hidden_size, group)
        self.layers = nn.ModuleList(DecoderLayer(config, layer, group) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.frequencies = inverse_frequencies(config.rope, config.head_dim)
        self._rope_scaling = config.rope.attention_factor

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Return the rotation of each of ``positions`` ``[num_tokens]``; see the function ``rotation``."""
        return rotation(self.frequencies, positions, dtype, self._rope_scaling)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        step: Steps,
        caches: Sequence[Tensor] | None,
        watch: LayerWatch | None = None,
    ) -> Tensor:
        """Map token ids and positions ``[num_tokens]`` to hidden states ``[num_tokens, hidden_size]``.

        caches: per layer ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``; None attends within the batch.
        """
        states: Tensor = self.embed_tokens(input_ids)
        turn = self.rotation(positions, states.dtype)
        for index, layer in enumerate(self.layers):
            stored = None if watch is None else partial(watch.on_stored, index + 1)
            cache = None if caches is None else caches[index]
            states = layer(states, turn, step_of(step, index), cache, stored)
        normed: Tensor = self.norm(states)
        return normed


class CausalLM(LanguageModel):
    """A decoder with its output head, if it has one."""

    def __init__(self, config: DecoderConfig, head: Head, group: RankGroup) -> None:
        super().__init__()
        self.model = Decoder(config, group)
        self._head = head
        self.lm_head: LinearOp | None = (
            DenseLinear(config.hidden_size, share_of(config.vocab_size, group.size), bias=False)
            if head is Head.OWN
            else None
        )

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        step: Steps,
        caches: Sequence[Tensor] | None,
        watch: LayerWatch | None = None,
    ) -> Tensor:
        """See ``Decoder.forward``."""
        states: Tensor = self.model(input_ids, positions, step, caches, watch)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """See LanguageModel."""
        head = self.head
        if head is None:
            if len(states):
                raise InternalError("the model has no output head; no token can be sampled from it")
            return states.new_empty(0, self.model.embed_tokens.num_embeddings)
        return head(states)

    def write_logits(self, states: Tensor, target: Tensor) -> None:
        """See LanguageModel."""
        matrix = None if self.head is None else self.head.matrix
        if matrix is None:
            target.copy_(self.logits(states))
        else:
            torch.mm(states, matrix.weight.t(), out=target)

    @property
    def head(self) -> LinearOp | None:
        """The product that gives this rank's logits, ``[vocab_size, hidden_size]`` without a bias; None without a head."""
        if self._head is Head.NONE:
            return None
        return self.lm_head or Product(self.model.embed_tokens.weight, None)

    def place(self, device: torch.device) -> None:
        """See LanguageModel."""
        self.model.frequencies = self.model.frequencies.to(device)
