"""Starts the demo model near a recall circuit, so that training sharpens it instead of searching for it.

A small model finds in-context recall only after a long plateau: two attention heads must come to work together
("induction heads", Olsson et al. 2022). We write a rough one into the initial weights: in layer 0 two heads look one
and two tokens back and copy a projection of what they see; in layer 1 all heads match "the token before me" against
"the token two before you" and copy the embedding found there, which completes ``key: value``. Everything stays
trainable, and nothing of the vocabulary is written in. Measured: with it the loss falls within 300 steps to where
it does not get in 1,500 steps without.
"""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

ROPE_THETA = 500_000.0
_COPY = 32
_CONSTANT = 0.5
_LOCAL_PAIRS = 4
_FIRST_SLOW_PAIR = 6
_SHARPNESS = 7.0
_MATCH = 3.0


class RecallCircuit:
    """Writes the circuit into a fresh model whose head size is 32; call ``plant`` once, before training."""

    def __init__(self, config: LlamaConfig, seed: int) -> None:
        if config.head_dim != _COPY:
            raise ValueError(f"the circuit is made for head_dim {_COPY}, not {config.head_dim}")
        self._config = config
        self._random = torch.Generator().manual_seed(seed)
        hidden = config.hidden_size
        std = config.initializer_range
        self._words = slice(1, hidden - 2 * _COPY)
        self._one_back = slice(hidden - 2 * _COPY, hidden - _COPY)
        self._two_back = slice(hidden - _COPY, hidden)
        self._num_words = hidden - 2 * _COPY - 1
        energy = self._num_words * std**2 + _CONSTANT**2
        self._norms: list[float] = [(energy / hidden) ** 0.5, ((energy + 2 * _COPY * std**2) / hidden) ** 0.5]
        self._gain = (self._num_words / _COPY) ** 0.5

    def plant(self, model: LlamaForCausalLM) -> None:
        """Change the embedding and the attention of layers 0 and 1 in place."""
        with torch.no_grad():
            embedding = model.model.embed_tokens.weight
            embedding[:, 0] = _CONSTANT
            embedding[:, self._one_back.start :] = 0.0
            self._plant_looking_back(*self._heads(model, 0))
            self._plant_matching(*self._heads(model, 1))

    def _heads(self, model: LlamaForCausalLM, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return views by head: query, key and value ``[num_heads, 32, hidden]``, output ``[hidden, num_heads, 32]``."""
        attention = model.model.layers[layer].self_attn
        hidden = self._config.hidden_size
        query, key, value = (
            projection.weight.view(-1, _COPY, hidden)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        return query, key, value, attention.o_proj.weight.view(hidden, -1, _COPY)

    def _plant_looking_back(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        key[0] *= 0.3
        key[0, :, 0] = self._rotated(1.0)
        value[0] = 0.0
        value[0][:, self._words] = self._orthonormal(_COPY, self._num_words) * self._gain
        for head, (distance, room) in enumerate(((1.0, self._one_back), (2.0, self._two_back))):
            query[head] *= 0.3
            query[head, :, 0] = self._rotated(1.0 - distance)
            output[:, head] = 0.0
            output[room, head] = torch.eye(_COPY) * self._norms[0]

    def _plant_matching(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        half = _COPY // 2
        slow = [i + part for part in (0, half) for i in range(_FIRST_SLOW_PAIR, half)]
        group = query.shape[0] // key.shape[0]
        for kv_head in range(key.shape[0]):
            match = torch.zeros(_COPY, _COPY)
            scale = _MATCH**0.5 * self._norms[1] / self._config.initializer_range
            match[slow] = self._orthonormal(_COPY, _COPY)[: len(slow)] * scale
            key[kv_head] *= 0.3
            key[kv_head][:, self._two_back] = match
            copy = self._orthonormal(_COPY, self._num_words)
            value[kv_head] = 0.0
            value[kv_head][:, self._words] = copy * self._gain
            for head in range(kv_head * group, (kv_head + 1) * group):
                query[head] *= 0.3
                query[head][:, self._one_back] = match
                output[:, head] = 0.0
                output[self._words, head] = copy.T * self._norms[1] * self._gain * 3.0 / group

    def _rotated(self, distance: float) -> Tensor:
        """Return a query or key ``[32]`` that the rotary embedding rotates towards the token ``distance`` away."""
        half = _COPY // 2
        angles = distance * ROPE_THETA ** (-torch.arange(half)[:_LOCAL_PAIRS].float() / half)
        facing = torch.zeros(_COPY)
        facing[:_LOCAL_PAIRS] = torch.cos(angles)
        facing[half : half + _LOCAL_PAIRS] = torch.sin(angles)
        scale = _SHARPNESS * float(self._norms[0]) / _CONSTANT
        return facing * scale

    def _orthonormal(self, rows: int, columns: int) -> Tensor:
        basis: Tensor = torch.linalg.qr(torch.randn(columns, rows, generator=self._random))[0]
        return basis.T
