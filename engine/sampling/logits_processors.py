"""Changes of the logits that a request requires before a token is sampled, in float32, row by row.

The order is vLLM's: the grammar's mask, allowed tokens, biases, the repetition penalty (arXiv:1909.05858), OpenAI's
frequency and presence penalties, and last, whatever the biases, no token that would end the answer before ``min_tokens``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contract.sampling import SamplingParams
from engine.compute.staging import to_device

NO_TOKENS: NDArray[np.int32] = np.zeros(0, dtype=np.int32)


@dataclass(slots=True)
class SamplingRow:
    """One request that samples a token.

    position: absolute index of the new token in the sequence, prompt included. num_generated: tokens of the answer so far
    (min_tokens counts them). bitmask: int32 words of a grammar; token t is allowed if bit t % 32 of word t // 32 is set.
    prompt_tokens, answer_tokens: the tokens so far, if ``SamplingParams.counts_tokens``.
    """

    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    position: int
    num_generated: int
    prompt_tokens: NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS, compare=False)
    answer_tokens: NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS, compare=False)
    bitmask: NDArray[np.int32] | None = field(default=None, compare=False)

    @property
    def changes_scores(self) -> bool:
        """True if a logits processor applies to this row."""
        sampling = self.sampling
        is_narrowed = bool(sampling.allowed_token_ids) or self.bitmask is not None
        return is_narrowed or sampling.counts_tokens or bool(sampling.logit_bias or self.forbidden_token_ids)

    @property
    def takes_best(self) -> bool:
        """True if the token is that of the model's highest logit and no log probabilities are requested."""
        return self.sampling.temperature == 0 and self.sampling.logprobs is None and not self.changes_scores

    @property
    def forbidden_token_ids(self) -> tuple[int, ...]:
        """Ids that would end the answer before ``min_tokens``."""
        if self.num_generated >= self.sampling.min_tokens:
            return ()
        return self.sampling.end_token_ids(self.eos_token_ids)


def adjusted(raw: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return a copy of ``raw [num_rows, vocab_size]`` with every row's changes, or ``raw`` itself if there are none."""
    scores = raw
    for i, row in enumerate(rows):
        if not row.changes_scores:
            continue
        sampling = row.sampling
        forbidden = row.forbidden_token_ids
        scores = raw.clone() if scores is raw else scores
        _mask(scores[i], row.bitmask)
        _allow(scores[i], sampling.allowed_token_ids)
        _add_biases(scores[i], sampling.logit_bias)
        if sampling.counts_tokens:
            _penalize(scores[i], row)
        if known := [token for token in forbidden if token < len(scores[i])]:
            scores[i].index_fill_(0, to_device(np.array(known), scores.device), -torch.inf)
    return scores


def _mask(scores: Tensor, bitmask: NDArray[np.int32] | None) -> None:
    if bitmask is None:
        return
    if scores.device.type == "cpu":
        octets = bitmask.astype("<i4", copy=False).view(np.uint8)
        allowed = np.unpackbits(octets, bitorder="little", count=len(scores)).astype(np.float32)
        own = scores.numpy()
        np.minimum(own, (allowed - 0.5) * np.inf, out=own)  # selecting bit by bit takes ten times as long
        return
    words = to_device(bitmask, scores.device)
    places = torch.arange(32, device=scores.device, dtype=torch.int32)
    is_allowed = (words[:, None] >> places) & 1
    scores.masked_fill_(is_allowed.flatten()[: len(scores)] == 0, -torch.inf)


def _allow(scores: Tensor, token_ids: tuple[int, ...]) -> None:
    if token_ids:
        allowed = to_device(np.array(token_ids), scores.device)
        kept = scores[allowed]
        scores.fill_(-torch.inf)
        scores[allowed] = kept


def _add_biases(scores: Tensor, biases: tuple[tuple[int, float], ...]) -> None:
    if biases:
        token_ids, values = zip(*biases, strict=True)
        places = to_device(np.array(token_ids), scores.device)
        scores[places] += to_device(np.array(values, dtype=np.float32), scores.device)


def _penalize(scores: Tensor, row: SamplingRow) -> None:
    sampling = row.sampling
    answered, counts = np.unique(row.answer_tokens, return_counts=True)
    if sampling.repetition_penalty != 1.0:
        there = to_device(np.union1d(answered, row.prompt_tokens), scores.device)
        found = scores[there]
        penalty = sampling.repetition_penalty
        scores[there] = torch.where(found > 0, found / penalty, found * penalty)
    taken = counts * sampling.frequency_penalty + sampling.presence_penalty
    scores[to_device(answered, scores.device)] -= to_device(taken.astype(np.float32), scores.device)
