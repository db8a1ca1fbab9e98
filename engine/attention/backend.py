"""The interface between models and attention kernels: plan a step once, attend in every layer."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor

from contract.errors import SettingError
from engine.compute.inputs import PreparedInputs


@dataclass(frozen=True)
class LayerShape:
    """The parameters that differ between layers: the scores' scale and the window, in tokens (None: all).

    softcap: scores become softcap × tanh(score / softcap) after scaling (Gemma 2); None applies none.
    """

    scale: float
    sliding_window: int | None
    softcap: float | None = None


@dataclass(frozen=True)
class Slots:
    """The places of the KV of a step's tokens, int32 ``[num_tokens]``, on the device.

    places: slots of the pool (-1: none). num_cleared: slots to zero behind each, as the torch backend clears a fresh block.
    """

    places: Tensor
    num_cleared: Tensor


StoreKV = Callable[[Tensor, Tensor, Tensor, Slots], None]
"""Stores keys and values in a layer's part of the pool, as ``AttentionStep.store``, in slots at fixed addresses."""


class AttentionStep(Protocol):
    """The attention of one forward pass, valid for that pass only."""

    @property
    def slots(self) -> Slots | None:
        """The slots for a kernel that stores the KV which it computes, in place of ``store``; None: only ``store`` can."""

    def store(self, key: Tensor, value: Tensor, cache: Tensor) -> None:
        """Write the tokens' keys and values, ``[num_tokens, num_kv_heads, head_dim]``, into a layer's part of the pool.

        cache: a view of that part, ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``.
        """

    def attend(
        self,
        shape: LayerShape,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: Tensor | None,
    ) -> Tensor:
        """Attend over all tokens that each token may see; ``cache`` already holds them.

        query ``[num_tokens, num_heads, head_dim]``; key, value and cache as in ``store``. Without a cache (the profile
        run) the tokens of a request see only each other; only then key and value are read. Returns the query's shape.
        """


class PlannedStep(AttentionStep, Protocol):
    """A step with any number of tokens of each request."""

    def attend_into(self, shape: LayerShape, query: Tensor, cache: Tensor, output: Tensor) -> None:
        """Attend as ``attend`` does with a cache; write the result into contiguous ``output``, of the query's shape."""


class StaticDecode(AttentionStep, Protocol):
    """A step with tensors at fixed addresses, so that a graph of it can be captured and replayed for other requests."""

    def refill(self, inputs: PreparedInputs) -> bool:
        """Load another step. Unused rows see only the null block, and store nothing.

        Only one static step of a backend is loaded at a time. Return False for a step that it has no room for.
        """


class AttentionBackend(Protocol):
    """One way to compute attention."""

    def plan(self, inputs: PreparedInputs, block_size: int, device: torch.device) -> PlannedStep:
        """Move the tensors that all layers share to the device, once per step."""

    def plan_static(
        self, num_reqs: int, max_blocks: int, block_size: int, device: torch.device
    ) -> StaticDecode | None:
        """Plan steps of exactly ``num_reqs`` requests with one token each; None if the backend has no static steps.

        max_blocks: the columns of the block table. The caller requests the largest number first.
        """

    def static_store(self) -> StoreKV | None:
        """Return what stores KV in captured steps of any lengths; None if the backend has no static steps."""


BACKENDS = {
    "flashinfer": ("engine.attention.flashinfer_backend", "FlashInferBackend"),
    "hybrid": ("engine.attention.hybrid_backend", "HybridBackend"),
    "torch": ("engine.attention.torch_backend", "TorchBackend"),
    "triton": ("engine.attention.triton_backend", "TritonBackend"),
}


def create_backend(name: str) -> AttentionBackend:
    """Make the backend of this name. Raises SettingError that lists the known ones."""
    if name not in BACKENDS:
        raise SettingError(f"attention backend {name!r} is unknown; choose one of {', '.join(BACKENDS)}")
    module, attribute = BACKENDS[name]
    return cast(Callable[[], AttentionBackend], getattr(import_module(module), attribute))()
