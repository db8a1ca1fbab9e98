"""The seam between models and attention kernels: plan a step once, attend in every layer."""

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
    """What differs between layers: the scale of the scores, and how many tokens a token sees (None: all).

    softcap: scores become softcap × tanh(score / softcap) after scaling (Gemma 2); None leaves them.
    """

    scale: float
    sliding_window: int | None
    softcap: float | None = None


class AttentionStep(Protocol):
    """The attention of one forward pass; valid for that pass alone."""

    def store(self, key: Tensor, value: Tensor, cache: Tensor) -> None:
        """Write the tokens' keys and values, ``[num_tokens, num_kv_heads, head_dim]``, into a layer's part of the pool.

        cache: a view of it, ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``.
        """

    def attend(
        self, shape: LayerShape, query: Tensor, key: Tensor, value: Tensor, cache: Tensor | None
    ) -> Tensor:
        """Mix the values of everything each token may see, which ``cache`` holds by now.

        query ``[num_tokens, num_heads, head_dim]``; key, value and cache as in ``store``. Without a cache (the profile
        run) the tokens of a request see each other alone. Returns query's shape.
        """


class StaticDecode(AttentionStep, Protocol):
    """A step whose tensors stay where they are, so that a graph can be captured of it and replayed for other requests."""

    def refill(self, inputs: PreparedInputs) -> None:
        """Put another step in. Rows that it has not see the null block alone, and store nothing."""


class AttentionBackend(Protocol):
    """One way to compute attention."""

    def plan(self, inputs: PreparedInputs, block_size: int, device: torch.device) -> AttentionStep:
        """Move what the layers share to the device: once per step, not once per layer."""

    def plan_static(
        self, num_reqs: int, max_blocks: int, block_size: int, device: torch.device
    ) -> StaticDecode | None:
        """For steps of exactly ``num_reqs`` requests with one token each; None where the backend has no such thing.

        max_blocks: the columns of the block table. The largest number is asked for first.
        """


BACKENDS = {
    "flashinfer": ("engine.attention.flashinfer_backend", "FlashInferBackend"),
    "torch": ("engine.attention.torch_backend", "TorchBackend"),
    "triton": ("engine.attention.triton_backend", "TritonBackend"),
}


def create_backend(name: str) -> AttentionBackend:
    """The backend of this name. Raises SettingError that lists the known ones."""
    if name not in BACKENDS:
        raise SettingError(f"attention backend {name!r} is unknown; choose one of {', '.join(BACKENDS)}")
    module, attribute = BACKENDS[name]
    return cast(Callable[[], AttentionBackend], getattr(import_module(module), attribute))()
