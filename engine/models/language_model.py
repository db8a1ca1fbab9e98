"""The interface of every model: hidden states over the paged KV cache, and their logits."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.attention.backend import Steps
from engine.connector import LayerWatch
from engine.models.recurrent_layers import RecurrentLayers


class LanguageModel(nn.Module, ABC):
    """A causal decoder on one rank. Its parameters have the names of the checkpoint's tensors.

    special_attention: what of its attention plain torch alone computes, in words; None: nothing. recurrent: its recurrent
    layers; None without any.
    """

    special_attention: str | None = None
    recurrent: RecurrentLayers | None = None

    @abstractmethod
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        step: Steps,
        caches: Sequence[Tensor] | None,
        watch: LayerWatch | None = None,
    ) -> Tensor:
        """Map token ids and positions ``[num_tokens]`` to hidden states ``[num_tokens, hidden_size]``.

        caches: per layer ``[num_blocks, parts, num_kv_heads, block_size, head_dim]``; None attends within the batch.
        watch: called for every layer whose KV is written.
        """

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Map hidden states ``[num_rows, hidden_size]`` to this rank's logits ``[num_rows, num_columns]`` of the same dtype.

        One rank has the columns of the whole vocabulary. Several have equal numbers of them, one rank's behind the other's,
        with padding at the end. A model without a head returns no rows for no rows, and raises InternalError otherwise.
        """

    def write_logits(self, states: Tensor, target: Tensor) -> None:
        """Write ``logits`` into ``target``; a model that can compute them there does not copy them."""
        target.copy_(self.logits(states))

    def place(self, device: torch.device) -> None:
        """Move the tensors that are not weights of the checkpoint to ``device``."""
