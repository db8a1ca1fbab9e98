"""A decoder on CUDA with the same weights and results as its modules, in fewer and larger operations.

A step of few tokens is a sequence of small kernels, and each costs two microseconds however little it computes. So layers
that read the same states become one product (q, k and v; gate and up), and everything between two products one kernel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.attention.backend import AttentionStep, LayerShape
from engine.connector import LayerWatch
from engine.fp8.linear import Fp8Linear, join
from engine.fused.rows import HeadNorms, gated, normed, turned
from engine.models.config import DecoderConfig
from engine.models.decoder import CausalLM, DecoderLayer
from engine.models.language_model import LanguageModel
from engine.models.layers import RMSNorm
from engine.models.rope import rotation


class FusedDecoder(LanguageModel):
    """Computes ``model`` with its own weights; weights that are multiplied together become views of one matrix, for good."""

    def __init__(self, model: CausalLM, config: DecoderConfig) -> None:
        super().__init__()
        self._plain = model
        self._config = config
        self._layers = [_layer(module) for module in model.model.layers if isinstance(module, DecoderLayer)]
        self._sizes = (config.num_heads, config.num_kv_heads, config.head_dim)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        step: AttentionStep,
        caches: Sequence[Tensor] | None,
        watch: LayerWatch | None = None,
    ) -> Tensor:
        """See LanguageModel."""
        decoder = self._plain.model
        residual: Tensor = decoder.embed_tokens(input_ids)
        turn = rotation(decoder.frequencies, positions, residual.dtype)
        added: Tensor | None = None
        for index, layer in enumerate(self._layers):
            states = self._normed(residual, added, layer.input_norm)
            query, key, value = turned(
                layer.qkv(states), turn, layer.head_norms, self._config.rms_norm_eps, self._sizes
            )
            if caches is not None:
                step.store(key, value, caches[index])
            if watch is not None:
                watch.stored(index + 1)
            mixed = step.attend(layer.shape, query, key, value, None if caches is None else caches[index])
            states = self._normed(residual, layer.output(mixed.flatten(-2)), layer.mlp_norm)
            added = layer.down(gated(layer.gate_up(states)))
        return self._normed(residual, added, decoder.norm.weight)

    def logits(self, states: Tensor) -> Tensor:
        """See LanguageModel."""
        return self._plain.logits(states)

    def _normed(self, residual: Tensor, added: Tensor | None, weight: Tensor) -> Tensor:
        return normed(residual, added, weight, self._config.rms_norm_eps)


@dataclass(frozen=True)
class Product:
    """A linear layer, ``[num_outputs, num_inputs]``."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, states: Tensor) -> Tensor:
        """Map ``[num_tokens, num_inputs]`` to ``[num_tokens, num_outputs]``."""
        return F.linear(states, self.weight, self.bias)


@dataclass(frozen=True)
class _Layer:
    shape: LayerShape
    input_norm: Tensor
    qkv: Callable[[Tensor], Tensor]
    head_norms: HeadNorms | None
    output: nn.Module
    mlp_norm: Tensor
    gate_up: Callable[[Tensor], Tensor]
    down: nn.Module


def _layer(layer: DecoderLayer) -> _Layer:
    attention = layer.self_attn
    mlp = layer.mlp
    head_norms = None
    if isinstance(attention.q_norm, RMSNorm) and isinstance(attention.k_norm, RMSNorm):
        head_norms = HeadNorms(attention.q_norm.weight, attention.k_norm.weight)
    return _Layer(
        shape=attention.shape,
        input_norm=layer.input_layernorm.weight,
        qkv=joined(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=head_norms,
        output=attention.o_proj,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=joined(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj,
    )


def joined(*linears: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Replace layers that read the same states by one product; their weights and biases become views of its."""
    if any(isinstance(linear, Fp8Linear) for linear in linears):
        return join(linears)
    return Product(_joined(linears, "weight"), None if linears[0].bias is None else _joined(linears, "bias"))


def _joined(linears: Sequence[nn.Linear], name: str) -> Tensor:
    whole = torch.cat([getattr(linear, name) for linear in linears]).detach()
    parts = torch.split(whole, [linear.out_features for linear in linears])
    for linear, part in zip(linears, parts, strict=True):
        linear.register_parameter(name, nn.Parameter(part, requires_grad=False))
    return whole
