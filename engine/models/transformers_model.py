"""A decoder that transformers defines, on the paged KV cache."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from engine.attention.backend import AttentionStep
from engine.connector import LayerWatch
from engine.models.language_model import LanguageModel
from engine.models.paged_attention import SERVING, PagedAttention, attach


class TransformersModel(LanguageModel):
    """A causal language model of transformers, split into the decoder and the layers that compute logits.

    Takes ownership of ``whole``. The layers behind the decoder (a head, scales, soft caps) run through the model's own
    ``forward``, in which a module that returns the decoder's states replaces the decoder.
    """

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self._attention = PagedAttention()
        whole.set_attn_implementation(SERVING)
        attach(whole, self._attention)
        self.decoder: nn.Module = whole.get_decoder()
        self._given = _GivenStates()
        place = next(name for name, module in whole.named_modules() if module is self.decoder)
        whole.set_submodule(place, self._given)
        self.tail = whole

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        step: AttentionStep,
        caches: Sequence[Tensor] | None,
        watch: LayerWatch | None = None,
    ) -> Tensor:
        """See LanguageModel."""
        with self._attention.during(step, caches, watch):
            output = self.decoder(
                input_ids=input_ids[None].long(), position_ids=positions[None].long(), use_cache=False
            )
        self._given.kind = type(output)
        states: Tensor = output.last_hidden_state[0]
        return states

    def logits(self, states: Tensor) -> Tensor:
        """See LanguageModel."""
        unread = torch.zeros((1, len(states)), dtype=torch.long, device=states.device)
        self._given.states = states[None]
        logits: Tensor = self.tail(input_ids=unread, use_cache=False).logits[0]
        self._given.states = None
        return logits.to(states.dtype)


class _GivenStates(nn.Module):
    """A replacement for the decoder that returns given states. kind: the class of the decoder's output."""

    states: Tensor | None = None
    kind: type[ModelOutput] = ModelOutput

    def forward(self, *_: object, **__: object) -> ModelOutput:
        """Return ``states`` for any input."""
        return self.kind(last_hidden_state=self.states)
