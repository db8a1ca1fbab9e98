"""One forward pass of a loaded model, by whatever computes it best on this machine."""

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend, create_backend
from engine.connector import LayerWatch
from engine.inputs import PreparedInputs
from engine.kernels.decoder import KernelDecoder, why_unserved
from engine.kernels.library import load_kernels
from engine.models.config import DecoderConfig
from engine.models.decoder import CausalLM
from engine.models.language_model import LanguageModel
from engine.models.loading import LoadedModel
from engine.settings import EngineSettings

logger = logging.getLogger(__name__)


class ForwardPass(Protocol):
    """What a rank computes with. ``close`` it."""

    def forward(
        self, inputs: PreparedInputs, caches: Sequence[Tensor] | None, watch: LayerWatch | None = None
    ) -> Tensor:
        """Final hidden states ``[num_tokens, hidden_size]``, equal on all ranks; valid until the next call.

        caches: per layer ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``; None keeps nothing. watch: is told of
        every layer whose KV is written.
        """

    def logits(self, states: Tensor) -> Tensor:
        """Hidden states ``[num_rows, hidden_size]`` to logits ``[num_rows, vocab_size]``; whole on rank 0 alone."""

    def close(self) -> None:
        """End its threads."""


class PlainForward:
    """A model of torch's modules, with an attention backend: what every other way is tested against."""

    def __init__(
        self, model: LanguageModel, backend: AttentionBackend, block_size: int, device: torch.device
    ) -> None:
        self._model, self._backend = model, backend
        self._block_size, self._device = block_size, device

    def forward(
        self, inputs: PreparedInputs, caches: Sequence[Tensor] | None, watch: LayerWatch | None = None
    ) -> Tensor:
        """See ForwardPass."""
        step = self._backend.plan(inputs, self._block_size, self._device)
        input_ids = torch.from_numpy(inputs.input_ids).to(self._device)
        positions = torch.from_numpy(inputs.positions).to(self._device)
        states: Tensor = self._model(input_ids, positions, step, caches, watch)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """See ForwardPass."""
        return self._model.logits(states)

    def close(self) -> None:
        """Nothing."""


def forward_pass(loaded: LoadedModel, settings: EngineSettings, device: torch.device) -> ForwardPass:
    """The kernels where they can compute this model here, else plain torch; which of them is logged."""
    plain = PlainForward(loaded.model, create_backend("torch"), settings.block_size, device)
    if not isinstance(loaded.model, CausalLM) or not isinstance(loaded.config, DecoderConfig):
        return plain
    reason = why_unserved(loaded.config, loaded.info.dtype, device, settings.tensor_parallel_size)
    if reason is not None:
        logger.info("plain torch computes the model, not the kernels: %s", reason)
        return plain
    kernels = load_kernels()
    if kernels is None:
        return plain
    logger.info("the kernels compute the model, with %d threads", settings.num_threads)
    torch.set_num_threads(1)  # they have their own
    return KernelDecoder(
        loaded.model,
        loaded.config,
        kernels,
        num_threads=settings.num_threads,
        cores=settings.cores,
        block_size=settings.block_size,
        max_length=loaded.info.max_model_len,
    )
