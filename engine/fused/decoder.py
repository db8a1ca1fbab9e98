"""A decoder on CUDA with the same weights and results as its modules, in fewer and larger operations.

A step of few tokens is a sequence of small kernels, and each costs two microseconds however little it computes. So layers
that read the same states become one product (q, k and v; gate and up), and everything between two products one kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.backend import LayerShape, Steps, step_of
from engine.connector import LayerWatch
from engine.fused.rows import HeadNorms, Heads, add_rms_norm, rotated_heads, silu_and_mul
from engine.fused.small_batch import Norm, SmallBatch
from engine.fused.small_batch_tiles import Form, Tiles
from engine.models.config import DecoderConfig
from engine.models.decoder import CausalLM, DecoderLayer, GatedMLP, RMSNorm
from engine.models.language_model import LanguageModel
from engine.models.linear import LinearOp, joined


class Residual:
    """States ``[num_tokens, hidden_size]``, changed in place.

    A small-batch product is one kernel with its norm, gate or sum. Other products leave their sum to the next norm, and so
    does one that ranks add up: its result is known behind the collective only.
    """

    def __init__(self, states: Tensor, eps: float, small_batch: SmallBatch) -> None:
        self._states = states
        self._eps = eps
        self._small_batch = small_batch
        self._added: Tensor | None = None

    def normed(self, norm: Tensor) -> Tensor:
        """Return the norm with weight ``norm [hidden_size]``."""
        added = self._added
        self._added = None
        return add_rms_norm(self._states, added, norm, self._eps)

    def multiplied(self, product: LinearOp, norm: Tensor) -> Tensor:
        """Return the product of the norm."""
        tiles = self._small_batch.tiles(product, self._states, Form.NORMED)
        if tiles is None or product.matrix is None or product.is_partial:
            return product(self.normed(norm))
        return self._small_batch.multiply(product.matrix, *self._read(tiles, norm))

    def gated(self, product: LinearOp, norm: Tensor) -> Tensor:
        """Return silu(gate) × up; the product of the norm has gate and up side by side."""
        tiles = self._small_batch.tiles(product, self._states, Form.GATED)
        if tiles is None or product.matrix is None or product.is_partial:
            return silu_and_mul(product(self.normed(norm)))
        return self._small_batch.multiply(product.matrix, *self._read(tiles, norm), is_gated=True)

    def add(self, product: LinearOp, states: Tensor) -> None:
        """Add the product of ``states``."""
        tiles = self._small_batch.tiles(product, states, Form.ADDED)
        if tiles is None or product.matrix is None:
            self._added = product(states)
        elif product.is_partial:
            self._added = product.total(self._small_batch.multiply(product.matrix, states, tiles))
        else:
            self._small_batch.add(product.matrix, states, tiles, self._states)

    def _read(self, tiles: Tiles, norm: Tensor) -> tuple[Tensor, Tiles, Norm | None]:
        """Return what a small-batch product reads: one row before its norm, or the norm of several."""
        if tiles.rows == 1 and self._added is None:
            return self._states, tiles, Norm(norm, self._eps)
        return self.normed(norm), tiles, None


class FusedDecoder(LanguageModel):
    """Computes ``model`` with its own weights; weights that are multiplied together become views of one matrix, for good.

    small_batch: the products of small batches; None: in bfloat16 only, in which it was measured.
    """

    def __init__(self, model: CausalLM, config: DecoderConfig, small_batch: SmallBatch | None = None) -> None:
        super().__init__()
        self._plain = model
        self._config = config
        self._layers = [
            _layer(module, config) for module in model.model.layers if isinstance(module, DecoderLayer)
        ]
        self._small_batch = small_batch or SmallBatch(model.model.norm.weight.device, [torch.bfloat16])
        self._head = None if model.head is None else joined(model.head)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        step: Steps,
        caches: Sequence[Tensor] | None,
        watch: LayerWatch | None = None,
    ) -> Tensor:
        """See LanguageModel."""
        decoder = self._plain.model
        states: Tensor = decoder.embed_tokens(input_ids)
        turn = decoder.rotation(positions, states.dtype)
        residual = Residual(states, self._config.rms_norm_eps, self._small_batch)
        for index, layer in enumerate(self._layers):
            cache = None if caches is None else caches[index]
            own_step = step_of(step, index)
            packed = residual.multiplied(layer.qkv, layer.input_norm)
            query, key, value = rotated_heads(layer.heads, packed, turn, own_step, cache)
            if watch is not None:
                watch.on_stored(index + 1)
            mixed = own_step.attend(layer.shape, query, key, value, cache)
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
        tiles = None if self._head is None else self._small_batch.tiles(self._head, states, Form.PLAIN)
        if self._head is None or self._head.matrix is None or tiles is None:
            return None
        return self._small_batch.multiply(self._head.matrix, states, tiles, output=target)


@dataclass(frozen=True)
class _Layer:
    shape: LayerShape
    input_norm: Tensor
    qkv: LinearOp
    heads: Heads
    output: LinearOp
    mlp_norm: Tensor
    gate_up: LinearOp
    down: LinearOp


def _layer(layer: DecoderLayer, config: DecoderConfig) -> _Layer:
    attention = layer.self_attn
    mlp = layer.mlp
    assert isinstance(mlp, GatedMLP), "no fused operations compute experts"
    norms = None
    if isinstance(attention.q_norm, RMSNorm) and isinstance(attention.k_norm, RMSNorm):
        norms = HeadNorms(attention.q_norm.weight, attention.k_norm.weight)
    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, norms, config.rms_norm_eps)
    return _Layer(
        shape=attention.shape,
        input_norm=layer.input_layernorm.weight,
        qkv=joined(attention.q_proj, attention.k_proj, attention.v_proj),
        heads=heads,
        output=joined(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=joined(mlp.gate_proj, mlp.up_proj),
        down=joined(mlp.down_proj),
    )
