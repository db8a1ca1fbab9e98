"""A model's weights, packed and compressed for the kernels in one allocation."""

import ctypes
import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.kernels.binding import CLayer, CLinear, CModel, Kernels
from engine.kernels.packing import LayerPacker, packed_bytes
from engine.models.config import DecoderConfig
from engine.models.decoder import CausalLM, DecoderLayer
from engine.models.layers import RMSNorm
from engine.models.load_progress import LoadProgress
from engine.models.rope import rotation

logger = logging.getLogger(__name__)


class PackedWeights:
    """Owns a compressed copy of every linear layer's weights, and the structs that describe the model to the kernels.

    What the model keeps (norms, the embedding) stays in its checkpoint's memory map. ``model`` loses its linear layers'
    weights. max_length: positions to have angles for. pool: the kernels' threads.
    """

    def __init__(
        self, model: CausalLM, config: DecoderConfig, max_length: int, kernels: Kernels, pool: int
    ) -> None:
        num_weights = sum(weight.numel() for weight in _weights(model))
        num_bytes = sum(packed_bytes(weight) for weight in _weights(model))
        layers = (CLayer * config.num_layers)()
        with LoadProgress(2 * num_weights, name="packed weights") as progress:
            packer = LayerPacker(kernels, pool, num_bytes, progress)
            for index, layer in enumerate(model.model.layers):
                assert isinstance(layer, DecoderLayer)
                layers[index] = _layer(packer, layer, config.sliding_windows[index])
            head = model.head_weight()
            self.head = None if head is None else packer.linear([head])
        share = 100 * packer.num_others / num_weights
        logger.info("%d weights are compressed to 12 bits, but for %.2g %% of them", num_weights, share)
        angles = rotation(model.model.frequencies, torch.arange(max_length), torch.bfloat16)
        cosines, sines = (
            packer.address(table[:, 0, : config.head_dim // 2].contiguous()) for table in angles
        )
        self.model = CModel(
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.num_layers,
            config.rms_norm_eps,
            config.head_dim**-0.5,
            layers,
            packer.address(model.model.norm.weight),
            packer.address(model.model.embed_tokens.weight),
            cosines,
            sines,
        )
        self.pointer = ctypes.pointer(self.model)
        self._kept = packer.kept


def _layer(packer: LayerPacker, layer: DecoderLayer, window: int | None) -> CLayer:
    attention = layer.self_attn
    mlp = layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return CLayer(
        packer.address(layer.input_layernorm.weight),
        packer.address(layer.post_attention_layernorm.weight),
        _norm(packer, attention.q_norm),
        _norm(packer, attention.k_norm),
        _linear(packer, projections),
        _linear(packer, [attention.o_proj]),
        _gated(packer, mlp.gate_proj, mlp.up_proj),
        _linear(packer, [mlp.down_proj]),
        window or 0,
    )


def _linear(packer: LayerPacker, linears: Sequence[nn.Linear]) -> CLinear:
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    layer = packer.linear([linear.weight for linear in linears], biases)
    _forget(linears)
    return layer


def _gated(packer: LayerPacker, gate: nn.Linear, up: nn.Linear) -> CLinear:
    layer = packer.gated(gate, up)
    _forget((gate, up))
    return layer


def _norm(packer: LayerPacker, norm: nn.Module) -> int | None:
    return packer.address(norm.weight) if isinstance(norm, RMSNorm) else None


def _forget(linears: Sequence[nn.Linear]) -> None:
    for linear in linears:
        linear.register_parameter("weight", None)


def _weights(model: CausalLM) -> list[Tensor]:
    linears = [module for module in model.model.modules() if isinstance(module, nn.Linear)]
    head = model.head_weight()
    return [*(linear.weight for linear in linears), *([] if head is None else [head])]


def null_caches(config: DecoderConfig, block_size: int) -> list[Tensor]:
    """Allocate a pool of one block for a forward pass whose KV is not kept."""
    shape = (1, 2, config.num_kv_heads, block_size, config.head_dim)
    return [torch.zeros(shape, dtype=torch.bfloat16)] * config.num_layers


def addresses(tensors: Sequence[Tensor]) -> "ctypes.Array[ctypes.c_void_p]":
    """Return the addresses of tensors as a C array."""
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
