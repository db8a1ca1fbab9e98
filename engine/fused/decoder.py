"""A decoder on CUDA with the same weights and results as its modules, in fewer and larger operations.

A step of few tokens is a sequence of small kernels, and each costs two microseconds however little it computes. So layers
that read the same states become one product (q, k and v; gate and up), and everything between two products one kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.backend import AttentionStep, LayerShape
from engine.connector import LayerWatch
from engine.fused.few_rows import FewRows
from engine.fused.few_tiles import Form
from engine.fused.product import Linear, Product, joined, product_of
from engine.fused.residual import Residual
from engine.fused.turning import HeadNorms, Heads, turned
from engine.models.config import DecoderConfig
from engine.models.decoder import CausalLM, DecoderLayer
from engine.models.language_model import LanguageModel
from engine.models.layers import RMSNorm
from engine.models.rope import rotation


class FusedDecoder(LanguageModel):
    """Computes ``model`` with its own weights; weights that are multiplied together become views of one matrix, for good.

    few_rows: multiplies few rows; None: in bfloat16 only, in which it was measured.
    """

    def __init__(self, model: CausalLM, config: DecoderConfig, few_rows: FewRows | None = None) -> None:
        super().__init__()
        self._plain = model
        self._config = config
        self._layers = [
            _layer(module, config) for module in model.model.layers if isinstance(module, DecoderLayer)
        ]
        self._few_rows = few_rows or FewRows(model.model.norm.weight.device, [torch.bfloat16])
        weight = model.head_weight()
        self._head = None if weight is None else Product(weight.detach(), None)

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
        states: Tensor = decoder.embed_tokens(input_ids)
        turn = rotation(decoder.frequencies, positions, states.dtype)
        residual = Residual(states, self._config.rms_norm_eps, self._few_rows)
        for index, layer in enumerate(self._layers):
            cache = None if caches is None else caches[index]
            packed = residual.multiplied(layer.qkv, layer.input_norm)
            query, key, value = turned(layer.heads, packed, turn, step, cache)
            if watch is not None:
                watch.stored(index + 1)
            mixed = step.attend(layer.shape, query, key, value, cache)
            residual.add(layer.output, mixed.flatten(-2))
            residual.add(layer.down, residual.gated(layer.gate_up, layer.mlp_norm))
        return residual.normed(decoder.norm.weight)

    def logits(self, states: Tensor) -> Tensor:
        """See LanguageModel."""
        logits = self._head_of_few(states, None)
        return self._plain.logits(states) if logits is None else logits

    def write_logits(self, states: Tensor, target: Tensor) -> None:
        """See LanguageModel."""
        if self._head_of_few(states, target) is None:
            self._plain.write_logits(states, target)

    def _head_of_few(self, states: Tensor, target: Tensor | None) -> Tensor | None:
        """Return the logits, in ``target`` if it is given; None if few rows have no kernel for them."""
        tiles = None if self._head is None else self._few_rows.tiles(self._head, states, Form.PLAIN)
        if self._head is None or tiles is None:
            return None
        return self._few_rows.multiply(self._head, states, tiles, output=target)


@dataclass(frozen=True)
class _Layer:
    shape: LayerShape
    input_norm: Tensor
    qkv: Linear
    heads: Heads
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


def _layer(layer: DecoderLayer, config: DecoderConfig) -> _Layer:
    attention = layer.self_attn
    mlp = layer.mlp
    norms = None
    if isinstance(attention.q_norm, RMSNorm) and isinstance(attention.k_norm, RMSNorm):
        norms = HeadNorms(attention.q_norm.weight, attention.k_norm.weight)
    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, norms, config.rms_norm_eps)
    return _Layer(
        shape=attention.shape,
        input_norm=layer.input_layernorm.weight,
        qkv=joined(attention.q_proj, attention.k_proj, attention.v_proj),
        heads=heads,
        output=product_of(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=joined(mlp.gate_proj, mlp.up_proj),
        down=product_of(mlp.down_proj),
    )
