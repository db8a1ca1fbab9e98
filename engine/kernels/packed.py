"""A model's weights, packed and compressed for the kernels in one allocation."""

import ctypes
import logging
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.kernels.binding import PANEL, CLayer, CLinear, CModel, Kernels
from engine.kernels.compressed import compress, num_panels, weight_bytes
from engine.models.config import DecoderConfig
from engine.models.decoder import CausalLM, DecoderLayer
from engine.models.layers import RMSNorm
from engine.models.load_progress import LoadProgress
from engine.models.rope import rotation

logger = logging.getLogger(__name__)
_LINE = 64


class PackedWeights:
    """Owns a compressed copy of every linear layer's weights, and the structs that describe the copy to C.

    The copy lies in private huge pages if the system has them. Norms and embedding stay in the checkpoint's memory map;
    ``model`` loses its linear layers' weights. max_length: the number of positions for which angles are computed.
    """

    def __init__(
        self, model: CausalLM, config: DecoderConfig, max_length: int, kernels: Kernels, pool: int
    ) -> None:
        self._kernels = kernels
        self._pool = pool
        self._free = _pages(_packed_bytes(model))
        self._panels = torch.empty(0, dtype=torch.bfloat16)
        """One layer before it is compressed."""
        self._kept: list[Tensor] = []
        self._num_others = 0
        layers = (CLayer * config.num_layers)()
        num_weights = sum(weight.numel() for weight in _weights(model))
        with LoadProgress(2 * num_weights, name="packed weights") as progress:
            self._progress = progress
            for index, layer in enumerate(model.model.layers):
                assert isinstance(layer, DecoderLayer)
                layers[index] = self._layer(layer, config.sliding_windows[index])
            head = model.head_weight()
            self.head = None if head is None else self._packed([head])
        del self._panels
        share = 100 * self._num_others / num_weights
        logger.info("%d weights are compressed to 12 bits, but for %.2g %% of them", num_weights, share)
        angles = rotation(model.model.frequencies, torch.arange(max_length), torch.bfloat16)
        cosines, sines = (self._address(table[:, 0, : config.head_dim // 2].contiguous()) for table in angles)
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
            self._address(model.model.norm.weight),
            self._address(model.model.embed_tokens.weight),
            cosines,
            sines,
        )

    def _layer(self, layer: DecoderLayer, window: int | None) -> CLayer:
        attention = layer.self_attn
        mlp = layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        return CLayer(
            self._address(layer.input_layernorm.weight),
            self._address(layer.post_attention_layernorm.weight),
            self._norm(attention.q_norm),
            self._norm(attention.k_norm),
            self._linear(projections),
            self._linear([attention.o_proj]),
            self._gated(mlp.gate_proj, mlp.up_proj),
            self._linear([mlp.down_proj]),
            window or 0,
        )

    def _linear(self, linears: Sequence[nn.Linear]) -> CLinear:
        """Make one layer that computes several, one after the other."""
        layer = self._packed([linear.weight for linear in linears])
        biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        layer.bias = self._bias(torch.cat(biases), layer.outputs) if biases else None
        _forget(linears)
        return layer

    def _packed(self, weights: Sequence[Tensor]) -> CLinear:
        outputs = sum(map(len, weights))
        inputs = weights[0].shape[1]
        panels = self._empty_panels(outputs, inputs)
        first = 0
        for weight in weights:
            self._pack(weight, panels, first)
            first += len(weight)
        return self._compressed(panels, outputs, inputs)

    def _gated(self, gate: nn.Linear, up: nn.Linear) -> CLinear:
        """Make one layer of which each panel holds gate in the first half and up in the second."""
        outputs = len(gate.weight) + len(up.weight)
        inputs = gate.in_features
        half = PANEL // 2
        panels = self._empty_panels(outputs, inputs)
        self._pack(gate.weight, panels, 0, half, 0)
        self._pack(up.weight, panels, 0, half, half)
        layer = self._compressed(panels, outputs, inputs)
        if gate.bias is not None:
            both = torch.stack((gate.bias.view(-1, half), up.bias.view(-1, half)), dim=1)
            layer.bias = self._bias(both.flatten(), outputs)
        _forget((gate, up))
        return layer

    def _empty_panels(self, outputs: int, inputs: int) -> Tensor:
        size = num_panels(outputs) * PANEL * inputs
        if size > len(self._panels):
            self._panels = torch.empty(size, dtype=torch.bfloat16)
        return self._panels[:size].zero_() if outputs % PANEL else self._panels[:size]

    def _pack(self, weight: Tensor, panels: Tensor, *places: int) -> None:
        self._kernels.pack(self._pool, weight, panels, *places)
        self._progress.advance(weight.nbytes)

    def _compressed(self, panels: Tensor, outputs: int, inputs: int) -> CLinear:
        size = weight_bytes(outputs, inputs)
        taken = self._free[:size]
        self._free = self._free[_rounded(size) :]
        compressed = compress(self._kernels, self._pool, panels, outputs, inputs, taken)
        self._kept.extend(compressed.kept)
        self._num_others += compressed.num_others
        return compressed.layer

    def _bias(self, bias: Tensor, outputs: int) -> int:
        padded = torch.zeros(num_panels(outputs) * PANEL, dtype=torch.bfloat16)
        padded[:outputs] = bias
        return self._address(padded)

    def _norm(self, norm: nn.Module) -> int | None:
        return self._address(norm.weight) if isinstance(norm, RMSNorm) else None

    def _address(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()


def _forget(linears: Sequence[nn.Linear]) -> None:
    for linear in linears:
        linear.register_parameter("weight", None)


def _rounded(num_bytes: int) -> int:
    """Round up to the next cache line."""
    return -(-num_bytes // _LINE) * _LINE


def _weights(model: CausalLM) -> list[Tensor]:
    linears = [module for module in model.model.modules() if isinstance(module, nn.Linear)]
    head = model.head_weight()
    return [*(linear.weight for linear in linears), *([] if head is None else [head])]


def _packed_bytes(model: CausalLM) -> int:
    return sum(weight_bytes(len(weight) + PANEL, weight.shape[1]) + _LINE for weight in _weights(model))


def _pages(num_bytes: int) -> Tensor:
    """Allocate page-aligned memory."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def null_caches(config: DecoderConfig, block_size: int) -> list[Tensor]:
    """Allocate a pool of one block for a forward pass whose KV is not kept."""
    shape = (1, 2, config.num_kv_heads, block_size, config.head_dim)
    return [torch.zeros(shape, dtype=torch.bfloat16)] * config.num_layers


def addresses(tensors: Sequence[Tensor]) -> "ctypes.Array[ctypes.c_void_p]":
    """Return the addresses of tensors as a C array."""
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
