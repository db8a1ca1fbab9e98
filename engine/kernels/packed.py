"""A model's weights, packed and compressed for the kernels: all linear layers one behind the other in one piece of memory.

A weight takes 12 bits, without loss: see ``compressed.c``.
"""

import ctypes
import logging
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from contract.errors import InternalError
from engine.kernels.binding import NUM_CODES, PANEL, CLayer, CLinear, CModel, Kernels
from engine.models.config import DecoderConfig
from engine.models.decoder import CausalLM, DecoderLayer, GatedMLP, RMSNorm
from engine.models.linear import LinearOp, Product
from engine.models.load_progress import LoadProgress

logger = logging.getLogger(__name__)
# Bytes of a cache line.
_LINE = 64


@dataclass(frozen=True)
class Compressed:
    """A layer in the form that the kernels read. ``kept`` owns the memory that it points to."""

    layer: CLinear
    kept: tuple[Tensor, ...]

    @property
    def num_others(self) -> int:
        """The number of weights stored in full, because their upper byte is not among the common ones."""
        return len(self.kept[-1])


def num_panels(outputs: int) -> int:
    """Return the number of panels that these outputs fill."""
    return -(-outputs // PANEL)


def weight_bytes(outputs: int, inputs: int) -> int:
    """Return the bytes of the weights, except the few that have no code."""
    return num_panels(outputs) * PANEL * inputs * 3 // 2


def compress(
    kernels: Kernels, pool: int, panels: Tensor, outputs: int, inputs: int, weight: Tensor | None = None
) -> Compressed:
    """Compress packed panels, which are not needed afterwards, into a layer without bias. weight: memory for its codes."""
    if weight is None:
        weight = torch.empty(weight_bytes(outputs, inputs), dtype=torch.uint8)
    uppers = torch.empty(NUM_CODES, dtype=torch.uint8)
    starts = torch.empty(num_panels(outputs) + 1, dtype=torch.int32)
    where = (weight.data_ptr(), uppers.data_ptr(), starts.data_ptr())
    layer = CLinear(*where, None, None, inputs, outputs)
    others = torch.empty(kernels.compress(pool, panels, layer), 2, dtype=torch.int32)
    layer.others = others.data_ptr()
    kernels.list_others(pool, panels, layer)
    return Compressed(layer, (weight, uppers, starts, others))


class LayerPacker:
    """Owns the memory of packed layers, and all tensors whose addresses the kernels use.

    The memory is ``num_bytes`` of private huge pages, where the system has them. pool: the kernels' threads. num_others:
    weights so far that have no code of 12 bits.
    """

    def __init__(self, kernels: Kernels, pool: int, num_bytes: int, progress: LoadProgress) -> None:
        self.kept: list[Tensor] = []
        self.num_others = 0
        self._kernels = kernels
        self._pool = pool
        self._progress = progress
        # Huge pages, where the system has them: a step reads all weights, and with small pages misses the TLB all the time.
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._free = torch.frombuffer(pages, dtype=torch.uint8)
        # One layer before it is compressed.
        self._panels = torch.empty(0, dtype=torch.bfloat16)

    def linear(self, products: Sequence[Product]) -> CLinear:
        """Pack layers into one that computes what they do, one behind the other."""
        outputs = sum(len(product.weight) for product in products)
        inputs = products[0].weight.shape[1]
        panels = self._empty_panels(outputs, inputs)
        first = 0
        for product in products:
            self._pack(product.weight, panels, first)
            first += len(product.weight)
        layer = self._compressed(panels, outputs, inputs)
        biases = [product.bias for product in products if product.bias is not None]
        layer.bias = self._bias(torch.cat(biases), outputs) if biases else None
        return layer

    def pack_gated(self, gate: Product, up: Product) -> CLinear:
        """Pack two layers into one: of each panel the gate has the first half and the other the second."""
        outputs = len(gate.weight) + len(up.weight)
        inputs = gate.weight.shape[1]
        half = PANEL // 2
        panels = self._empty_panels(outputs, inputs)
        self._pack(gate.weight, panels, 0, half, 0)
        self._pack(up.weight, panels, 0, half, half)
        layer = self._compressed(panels, outputs, inputs)
        if gate.bias is not None and up.bias is not None:
            both = torch.stack((gate.bias.view(-1, half), up.bias.view(-1, half)), dim=1)
            layer.bias = self._bias(both.flatten(), outputs)
        return layer

    def address(self, tensor: Tensor) -> int:
        """Return where a tensor is, and keep it there."""
        self.kept.append(tensor)
        return tensor.data_ptr()

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
        self._free = self._free[-(-size // _LINE) * _LINE :]  # each layer begins a cache line
        compressed = compress(self._kernels, self._pool, panels, outputs, inputs, taken)
        self.kept.extend(compressed.kept)
        self.num_others += compressed.num_others
        return compressed.layer

    def _bias(self, bias: Tensor, outputs: int) -> int:
        padded = torch.zeros(num_panels(outputs) * PANEL, dtype=torch.bfloat16)
        padded[:outputs] = bias
        return self.address(padded)


class PackedWeights:
    """Owns a compressed copy of every linear layer's weights, and the structs that describe the model to the kernels.

    What the model keeps (norms, the embedding) stays in its checkpoint's memory map. ``model`` loses its linear layers'
    weights. max_length: positions to have angles for. pool: the kernels' threads.
    """

    def __init__(
        self, model: CausalLM, config: DecoderConfig, max_length: int, kernels: Kernels, pool: int
    ) -> None:
        head = [] if model.head is None else [_matrix(model.head)]
        layers_ = [_matrix(layer) for layer in model.model.modules() if isinstance(layer, LinearOp)]
        shapes = [matrix.weight.shape for matrix in (*layers_, *head)]
        num_weights = sum(outputs * inputs for outputs, inputs in shapes)
        # An upper bound: a layer may begin a new panel, and a new line.
        num_bytes = sum(weight_bytes(outputs + PANEL, inputs) + _LINE for outputs, inputs in shapes)
        layers = (CLayer * config.num_layers)()
        with LoadProgress(2 * num_weights, name="packed weights") as progress:
            packer = LayerPacker(kernels, pool, num_bytes, progress)
            for index, layer in enumerate(model.model.layers):
                assert isinstance(layer, DecoderLayer)
                layers[index] = _layer(packer, layer, config.sliding_windows[index])
            self.head = packer.linear(head) if head else None
        share = 100 * packer.num_others / num_weights
        logger.info("%d weights are compressed to 12 bits, but for %.2g %% of them", num_weights, share)
        angles = model.model.rotation(torch.arange(max_length), torch.bfloat16)
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
    assert isinstance(mlp, GatedMLP), "the kernels compute no experts"
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return CLayer(  # packed in this order, in which a step reads them
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


def _linear(packer: LayerPacker, layers: Sequence[LinearOp]) -> CLinear:
    packed = packer.linear([_matrix(layer) for layer in layers])
    for layer in layers:
        layer.forget()  # its pages of the checkpoint are not needed any more
    return packed


def _gated(packer: LayerPacker, gate: LinearOp, up: LinearOp) -> CLinear:
    packed = packer.pack_gated(_matrix(gate), _matrix(up))
    gate.forget()
    up.forget()
    return packed


def _norm(packer: LayerPacker, norm: nn.Module) -> int | None:
    return packer.address(norm.weight) if isinstance(norm, RMSNorm) else None


def _matrix(layer: LinearOp) -> Product:
    if layer.matrix is None:
        raise InternalError(f"the kernels have no form for a layer of {layer.form}")
    return layer.matrix


def addresses(tensors: Sequence[Tensor]) -> "ctypes.Array[ctypes.c_void_p]":
    """Return the addresses of tensors as a C array."""
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
