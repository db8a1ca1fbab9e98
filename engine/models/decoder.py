"""One decoder for the Llama, Mistral, Qwen2 and Qwen3 families.

The tokens of all requests lie in one flat dimension. Only the attention step maps a token to its request and to the place
of its KV. Numerics follow transformers, so that float32 answers are equal token by token. Every module is built for one
rank: the config has that rank's share of heads and MLP width (``engine.models.sharding``).
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contract.errors import InternalError
from engine.attention.backend import AttentionStep, LayerShape
from engine.connector import LayerWatch
from engine.distributed.group import RankGroup
from engine.models.config import DecoderConfig, Head
from engine.models.language_model import LanguageModel
from engine.models.layers import GatedMLP, RMSNorm
from engine.models.rope import inverse_frequencies, rotate, rotation
from engine.models.sharding import embedding, row_parallel, share_of

Rotation = tuple[Tensor, Tensor]
Stored = Callable[[], None]
"""Called when a layer's KV is written: before its attention, which takes most of its time."""


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions; optional biases, head norms and sliding window."""

    def __init__(self, config: DecoderConfig, layer: int, group: RankGroup) -> None:
        super().__init__()
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = row_parallel(query_size, config.hidden_size, config.output_bias, group)
        norm = config.rms_norm_eps
        self.q_norm = RMSNorm(config.head_dim, norm) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, norm) if config.qk_norm else nn.Identity()
        self.head_dim = config.head_dim
        self.shape = LayerShape(config.head_dim**-0.5, config.sliding_windows[layer])

    def forward(
        self, states: Tensor, turn: Rotation, step: AttentionStep, cache: Tensor | None, stored: Stored
    ) -> Tensor:
        """Map ``[num_tokens, hidden_size]`` to the same shape; write the tokens' KV into ``cache``, then call ``stored``."""
        query, key, value = (
            projection(states).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = rotate(self.q_norm(query), *turn)
        key = rotate(self.k_norm(key), *turn)
        if cache is not None:
            step.store(key, value, cache)
        stored()
        mixed = step.attend(self.shape, query, key, value, cache)
        output: Tensor = self.o_proj(mixed.flatten(-2))
        return output


class DecoderLayer(nn.Module):
    """Attention, then the MLP, each on a normed input and added to the residual."""

    def __init__(self, config: DecoderConfig, layer: int, group: RankGroup) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer, group)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias, group)

    def forward(
        self, states: Tensor, turn: Rotation, step: AttentionStep, cache: Tensor | None, stored: Stored
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

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        step: AttentionStep,
        caches: Sequence[Tensor] | None,
        watch: LayerWatch | None = None,
    ) -> Tensor:
        """Map token ids and positions ``[num_tokens]`` to hidden states ``[num_tokens, hidden_size]``.

        caches: per layer ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``; None attends within the batch.
        """
        states: Tensor = self.embed_tokens(input_ids)
        turn = rotation(self.frequencies, positions, states.dtype)
        for index, layer in enumerate(self.layers):
            stored = _ignore if watch is None else partial(watch.stored, index + 1)
            states = layer(states, turn, step, None if caches is None else caches[index], stored)
        normed: Tensor = self.norm(states)
        return normed


def _ignore() -> None:
    """Do nothing: no one watches the layers."""


class CausalLM(LanguageModel):
    """A decoder with its output head, if it has one."""

    def __init__(self, config: DecoderConfig, head: Head, group: RankGroup) -> None:
        super().__init__()
        self.model = Decoder(config, group)
        self._head = head
        self.lm_head = (
            nn.Linear(config.hidden_size, share_of(config.vocab_size, group.size), bias=False)
            if head is Head.OWN
            else None
        )

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        step: AttentionStep,
        caches: Sequence[Tensor] | None,
        watch: LayerWatch | None = None,
    ) -> Tensor:
        """See ``Decoder.forward``."""
        states: Tensor = self.model(input_ids, positions, step, caches, watch)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """See LanguageModel."""
        if self._head is Head.NONE and len(states):
            raise InternalError("the model has no output head; no token can be sampled from it")
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(states, head.weight)

    def write_logits(self, states: Tensor, target: Tensor) -> None:
        """See LanguageModel."""
        weight = self.head_weight()
        if weight is None:
            target.copy_(self.logits(states))
        else:
            torch.mm(states, weight.t(), out=target)

    def head_weight(self) -> Tensor | None:
        """Return this rank's rows of the head's weight ``[vocab_size, hidden_size]``; None without a head."""
        if self._head is Head.NONE:
            return None
        weight = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        assert isinstance(weight, Tensor)
        return weight

    def place(self, device: torch.device) -> None:
        """See LanguageModel."""
        self.model.frequencies = self.model.frequencies.to(device)
