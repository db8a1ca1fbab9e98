"""Logits in, tokens out. A token depends only on its logits, its parameters, its seed and its position (law 6).

Sums of floating-point numbers depend on their order, and the order on the batch. So probabilities become whole
numbers before anything is summed: ``round(exp((logit - max) / temperature) * 2**40)``, computed in float64, element
by element. Their sums are exact, whatever else is in the batch and whichever device adds them up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.outputs import LogprobsLists
from engine.randomness import UNIFORM_BITS, uniform_bits
from engine.scores import SamplingRow, adjusted

_WEIGHT_SCALE = 2.0**40
_MAX_ELEMENTS_AT_ONCE = 2**24


@dataclass(frozen=True)
class Samples:
    """What was drawn, row by row.

    token_ids: None where the row's logits are not numbers. num_nans: how many of them were not. logprobs: row i has
    1 + k_i entries, none where the row asked for none or has no token.
    """

    token_ids: list[int | None]
    num_nans: list[int]
    logprobs: LogprobsLists | None


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> Samples:
    """Draw one token per row of ``logits [num_rows, vocab_size]``; ``logits`` stays as it is.

    First what ``engine.scores`` adds and takes away. Then temperature 0 takes the best token, the lowest id among equals.
    Otherwise: temperature, then min-p, then top-k, then top-p, then the inverse of the cumulative distribution in the
    order of the vocabulary.
    """
    raw = logits.to(torch.float32)
    scores = adjusted(raw, rows)
    best, is_usable = _best(scores)
    token_ids: list[int | None] = [*best]
    num_nans = [0] * len(rows) if is_usable and scores is raw else _count_unusable(raw, scores)
    random_rows = [i for i, row in enumerate(rows) if row.sampling.temperature > 0 and not num_nans[i]]
    rows_at_once = max(1, _MAX_ELEMENTS_AT_ONCE // logits.shape[1])
    for start in range(0, len(random_rows), rows_at_once):
        part = random_rows[start : start + rows_at_once]
        for i, token_id in zip(part, _draw(scores[part], [rows[i] for i in part]), strict=True):
            token_ids[i] = token_id
    for i, count in enumerate(num_nans):
        if count:
            token_ids[i] = None
    wanted = [row.sampling.logprobs for row in rows]
    is_wanted = any(k is not None for k in wanted)
    return Samples(token_ids, num_nans, token_logprobs(raw, token_ids, wanted) if is_wanted else None)


def _best(scores: Tensor) -> tuple[list[int], bool]:
    """The best token of each row, the lowest id among equals, and whether all these scores are numbers.

    A NaN counts as the best. On the host numpy finds them ten times as fast as torch.
    """
    if scores.device.type == "cpu":
        found = scores.numpy().argmax(axis=-1)
        values = scores.numpy()[np.arange(len(found)), found]
        return found.tolist(), bool(np.isfinite(values).all())
    top = scores.max(dim=-1)
    return top.indices.tolist(), bool(top.values.isfinite().all())


def _count_unusable(raw: Tensor, scores: Tensor) -> list[int]:
    """NaN and +infinity per row; a row where no token may be drawn counts whole."""
    highest = raw.amax(dim=-1)  # NaN where one is
    if scores is not raw:
        highest = highest + scores.amax(dim=-1)
    if all(map(math.isfinite, highest.tolist())):
        return [0] * len(raw)
    counts = (raw.isnan() | raw.isposinf()).sum(dim=-1)
    counts = torch.where(scores.isneginf().all(dim=-1), raw.shape[1], counts)
    return [int(count) for count in counts.tolist()]


def _draw(scores: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """One token per row with temperature above 0."""
    weights = _weights(scores, [row.sampling.temperature for row in rows])
    _keep_min_p(weights, [row.sampling.min_p for row in rows])
    _keep_top_k(weights, scores, [row.sampling.top_k for row in rows])
    _keep_top_p(weights, [row.sampling.top_p for row in rows])
    targets = [
        (uniform_bits(row.sampling.seed, row.position) * total) >> UNIFORM_BITS
        for row, total in zip(rows, weights.sum(dim=-1).tolist(), strict=True)
    ]
    return invert(weights, targets)


def invert(weights: Tensor, targets: list[int]) -> list[int]:
    """Per row of ``[num_rows, vocab_size]`` the first token up to which the weights sum to more than the target.

    A token of weight 0 is never found, for ``0 <= target < sum of the row``.
    """
    column = torch.tensor(targets, device=weights.device, dtype=torch.int64)[:, None]
    tokens: list[int] = torch.searchsorted(weights.cumsum(dim=-1), column, right=True)[:, 0].tolist()
    return tokens


def _weights(scores: Tensor, temperatures: list[float]) -> Tensor:
    """Probabilities as whole numbers, int64; the best token of a row has 2**40."""
    temperature = torch.tensor(temperatures, device=scores.device, dtype=torch.float64)[:, None]
    wide = scores.to(torch.float64)
    distances = (wide - wide.amax(dim=-1, keepdim=True)) / temperature
    return (distances.exp() * _WEIGHT_SCALE).round().to(torch.int64)


def _keep_min_p(weights: Tensor, limits: list[float]) -> None:
    """Set what is less than the share p of the best token's weight to 0, in place (arXiv:2407.01082)."""
    for i, p in enumerate(limits):
        if p > 0.0:
            weights[i].masked_fill_(weights[i] < round(p * _WEIGHT_SCALE), 0)


def _keep_top_k(weights: Tensor, scores: Tensor, limits: list[int]) -> None:
    """Set all but the k best scores of a row to weight 0, in place; among equals the lowest ids stay."""
    for i, k in enumerate(limits):
        if 0 < k < scores.shape[1]:
            threshold = scores[i].topk(k).values[-1]
            is_better, is_equal = scores[i] > threshold, scores[i] == threshold
            is_kept = is_better | (is_equal & (is_equal.cumsum(0) <= k - is_better.sum()))
            weights[i].masked_fill_(~is_kept, 0)


def _keep_top_p(weights: Tensor, limits: list[float]) -> None:
    """Keep the smallest set of best tokens that holds the share p of a row's weight, in place."""
    for i, p in enumerate(limits):
        if p < 1.0:
            ordered, order = weights[i].sort(descending=True, stable=True)
            before = ordered.cumsum(0) - ordered
            is_dropped = before.to(torch.float64) >= p * weights[i].sum().to(torch.float64)
            weights[i].index_fill_(0, order[is_dropped], 0)


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int | None], num_alternatives: Sequence[int | None]
) -> LogprobsLists:
    """Log-softmax in float32 of a given token a row of ``logits [num_rows, vocab_size]``, and of its k best.

    Nothing for a row without a token, or without a k.
    """
    lists = LogprobsLists([], [], [])
    for row, token_id, k in zip(logits.to(torch.float32), token_ids, num_alternatives, strict=True):
        ids, values, rank = _row_logprobs(row, token_id, k)
        lists.logprob_token_ids.append(ids)
        lists.logprobs.append(values)
        lists.sampled_token_ranks.append(rank)
    return lists


def _row_logprobs(
    raw: Tensor, token_id: int | None, num_alternatives: int | None
) -> tuple[list[int], list[float], int]:
    if token_id is None or num_alternatives is None:
        return [], [], 0
    logprobs = raw.log_softmax(dim=-1)
    best = logprobs.topk(min(num_alternatives, len(raw)))
    rank = int((logprobs > logprobs[token_id]).sum()) + 1
    ids = [token_id, *best.indices.tolist()]
    return ids, [float(logprobs[token_id]), *best.values.tolist()], rank
