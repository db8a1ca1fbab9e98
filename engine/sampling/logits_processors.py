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
    def is_greedy(self) -> bool:
        """True if the token is that of the model's highest logit and no log probabilities are requested."""
        return self.sampling.temperature == 0 and self.sampling.logprobs is None and not self.changes_scores

    @property
    def forbidden_token_ids(self) -> tuple[int, ...]:
        """Ids that would end the answer before ``min_tokens``."""
        if self.num_generated >= self.sampling.min_tokens:
            return ()
        return self.sampling.end_token_ids(self.eos_token_ids)


def adjusted(raw: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return a float32 copy of ``raw [num_rows, vocab_size]`` with every row's changes, or ``raw`` itself if there are none.

    Each kind of change is one operation on all rows that require it: a step's launches do not grow with its rows.
    """
    changed = [(i, row) for i, row in enumerate(rows) if row.changes_scores]
    if not changed:
        return raw
    scores = raw.to(torch.float32, copy=True)
    _mask(scores, [(i, row.bitmask) for i, row in changed if row.bitmask is not None])
    allowed = _cells([(i, row.sampling.allowed_token_ids) for i, row in changed])
    if len(allowed.rows):
        places = allowed.on(scores.device)
        kept = scores[places]
        scores[to_device(np.unique(allowed.rows), scores.device)] = -torch.inf
        scores[places] = kept
    biases = [(i, row.sampling.logit_bias) for i, row in changed]
    biased = _cells([(i, [token for token, _ in own]) for i, own in biases])
    if len(biased.rows):
        values = np.array([value for _, own in biases for _, value in own], dtype=np.float32)
        scores[biased.on(scores.device)] += to_device(values, scores.device)
    _penalize(scores, [(i, row) for i, row in changed if row.sampling.counts_tokens])
    width = scores.shape[1]
    forbidden = [(i, [token for token in row.forbidden_token_ids if token < width]) for i, row in changed]
    barred = _cells(forbidden)
    if len(barred.rows):
        scores[barred.on(scores.device)] = -torch.inf
    return scores


@dataclass(frozen=True)
class _Cells:
    """Some tokens of some rows, side by side."""

    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return an index into scores on this device."""
        rows, tokens = to_device(np.stack([self.rows, self.tokens]), device)
        return rows, tokens


def _cells(parts: Sequence[tuple[int, Sequence[int] | NDArray[np.int32]]]) -> _Cells:
    """Return the cells of (row, its tokens)."""
    counts = [len(tokens) for _, tokens in parts]
    rows = np.repeat(np.array([i for i, _ in parts], dtype=np.int64), counts)
    tokens = [np.asarray(tokens, dtype=np.int64) for _, tokens in parts if len(tokens)]
    return _Cells(rows, np.concatenate(tokens) if tokens else rows)


def _mask(scores: Tensor, masks: Sequence[tuple[int, NDArray[np.int32]]]) -> None:
    if not masks:
        return
    width = scores.shape[1]
    if scores.device.type == "cpu":
        for i, bitmask in masks:
            octets = bitmask.astype("<i4", copy=False).view(np.uint8)
            allowed = np.unpackbits(octets, bitorder="little", count=width).astype(np.float32)
            own = scores[i].numpy()
            np.minimum(own, (allowed - 0.5) * np.inf, out=own)  # selecting bit by bit takes ten times as long
        return
    places = to_device(np.array([i for i, _ in masks]), scores.device)
    words = to_device(np.stack([bitmask for _, bitmask in masks]), scores.device)
    scores[places] = scores[places].masked_fill(~allowed_of(words, width), -torch.inf)


def allowed_of(words: Tensor, width: int) -> Tensor:
    """Return which of ``width`` tokens the bits of ``words [num_rows, num_words]`` allow."""
    places = torch.arange(32, device=words.device, dtype=torch.int32)
    return (((words[:, :, None] >> places) & 1) == 1).flatten(1)[:, :width]


def _penalize(scores: Tensor, rows: Sequence[tuple[int, SamplingRow]]) -> None:
    answered = [np.unique(row.answer_tokens, return_counts=True) for _, row in rows]
    repeated = [
        (i, row.sampling.repetition_penalty, np.union1d(own, row.prompt_tokens))
        for (i, row), (own, _) in zip(rows, answered, strict=True)
        if row.sampling.repetition_penalty != 1.0
    ]
    cells = _cells([(i, tokens) for i, _, tokens in repeated])
    if len(cells.rows):
        places = cells.on(scores.device)
        found = scores[places]
        penalties = [np.full(len(tokens), penalty, dtype=np.float32) for _, penalty, tokens in repeated]
        penalty = to_device(np.concatenate(penalties), scores.device)
        scores[places] = torch.where(found > 0, found / penalty, found * penalty)
    cells = _cells([(i, own) for (i, _), (own, _) in zip(rows, answered, strict=True)])
    if len(cells.rows):
        taken = [
            counts * row.sampling.frequency_penalty + row.sampling.presence_penalty
            for (_, row), (_, counts) in zip(rows, answered, strict=True)
        ]
        scores[cells.on(scores.device)] -= to_device(np.concatenate(taken).astype(np.float32), scores.device)
