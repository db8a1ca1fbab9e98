"""What the engine needs of a model, whoever wrote it: hidden states over the paged KV cache, and logits of them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import Tensor, nn

from engine.attention.backend import AttentionStep
from engine.connector import LayerWatch


class Head(Enum):
    """What makes logits of hidden states. OWN: a layer of its own. TIED: the embedding. NONE: nothing does."""

    OWN = auto()
    TIED = auto()
    NONE = auto()


class LanguageModel(nn.Module, ABC):
    """A causal decoder on one rank. Its parameters have the names of the checkpoint's tensors."""

    @abstractmethod
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        step: AttentionStep,
        caches: Sequence[Tensor] | None,
        watch: LayerWatch | None = None,
    ) -> Tensor:
        """Token ids and positions ``[num_tokens]`` to hidden states ``[num_tokens, hidden_size]``.

        caches: per layer ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``; None attends within the batch.
        watch: is told of every layer whose KV is written.
        """

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Hidden states ``[num_rows, hidden_size]`` to logits ``[num_rows, vocab_size]`` of the same dtype.

        Only rank 0 gets the whole vocabulary; another rank gets the part that it computes. Raises InternalError where there
        is no head; for no rows ``[0, vocab_size]`` then.
        """

    def place(self, device: torch.device) -> None:
        """Move what is no weight of the checkpoint."""
