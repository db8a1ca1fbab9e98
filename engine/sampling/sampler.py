"""Sample tokens from logits. A token depends only on its logits, its parameters, its seed and its position (law 6).

Sums of floating-point numbers depend on their order, and the order on the batch. So probabilities become whole numbers
before they are summed: ``round(exp((logit - max) / temperature) * 2**40)``, computed in float64, element by element. Their
sums are exact in every batch and on every device. Everything is launched before the first result is read
(``begin_sampling``), so the next step can be launched in between.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.compute.staging import begin_copy, to_device
from engine.outputs import LogprobsLists
from engine.sampling.logits_processors import SamplingRow, adjusted
from engine.sampling.randomness import UNIFORM_BITS, uniform_bits_of

Draw = Callable[[Tensor, Sequence[SamplingRow]], Tensor]
"""Scores ``[num_rows, vocab_size]`` and how each row draws → int64 ``[2, num_rows]``: a token of each row, and 1 if its
scores are numbers, else 0 (then any token)."""

RandomDraw = Callable[[Tensor, Sequence[SamplingRow], Sequence[int]], Tensor]
"""Scores ``[num_rows, vocab_size]``, how each row draws, and which rows do (with temperature above 0) → their tokens, int64.

Any token for a row of NaN, and where none may be drawn.
"""

WEIGHT_SCALE = 2.0**40
# The number of scores processed together: on the host they stay in the caches, on a device one call has enough work.
_MAX_ELEMENTS_AT_ONCE = {"cpu": 2**18, "cuda": 2**24}
_LOW_BITS = 27
_LOW_TOTAL_BITS = 29
_DRAWN_BY = attrgetter(
    *(f"sampling.{name}" for name in ("temperature", "min_p", "top_k", "top_p", "seed")), "position"
)


@dataclass(frozen=True)
class Samples:
    """The sampled tokens, row by row.

    token_ids: None if the row's logits are not numbers. num_nans: how many of them are not, as far as that is still known
    when the tokens are read: at least 1. logprobs: row i has 1 + k_i entries, none if the row requires none or has no token.
    """

    token_ids: list[int | None]
    num_nans: list[int]
    logprobs: LogprobsLists | None


class Sampling(NamedTuple):
    """Tokens that are being sampled.

    read: waits for them. drawn: the same where the logits are, as ``Draw`` returns them; None if only ``read`` has them.
    """

    read: Callable[[], Samples]
    drawn: Tensor | None = None


def samples_of(pairs: Iterable[tuple[int, int]]) -> Samples:
    """Return the samples of rows of which no more is known than a token, and 1 if the row's logits are numbers, else 0."""
    token_ids: list[int | None] = []
    num_nans = list[int]()
    for token, is_number in pairs:
        token_ids.append(token if is_number else None)
        num_nans.append(1 - is_number)
    return Samples(token_ids, num_nans, None)


def sample(logits: Tensor, rows: Sequence[SamplingRow], draw: Draw | None = None) -> Samples:
    """Sample one token per row of ``logits [num_rows, vocab_size]``, and wait; see ``begin_sampling``."""
    return begin_sampling(logits, rows, draw).read()


def begin_sampling(logits: Tensor, rows: Sequence[SamplingRow], draw: Draw | None = None) -> Sampling:
    """Begin to sample one token per row of ``logits [num_rows, vocab_size]``, which may change as soon as this returns.

    The logits processors come first (``engine.sampling.logits_processors``). Temperature 0 takes the best token, the lowest
    id among equals. Otherwise temperature, min-p, top-k and top-p apply in this order, then the inverse of the cumulative
    distribution in the order of the vocabulary (``draw``; None: by torch).
    """
    is_ready = logits.dtype == torch.float32 or logits.device.type != "cpu"
    raw = logits if is_ready else logits.to(torch.float32)
    scores = adjusted(raw, rows)
    drawn = (draw or draw_by_torch)(scores, rows)
    tokens, is_number = drawn
    if scores is not raw:
        is_number &= raw.amax(dim=-1).isfinite()  # NaN where one is
    copied = begin_copy(drawn)
    wanted = [row.sampling.logprobs for row in rows]
    is_wanted = wanted.count(None) < len(wanted)
    logprobs = _begin_logprobs(raw, tokens, wanted) if is_wanted else None
    return Sampling(partial(_read, copied, logprobs, raw, scores), drawn)


def _read(
    drawn: Callable[[], list[list[int]]],
    logprobs: Callable[[], LogprobsLists] | None,
    raw: Tensor,
    scores: Tensor,
) -> Samples:
    """Wait for tokens and log probabilities; a row of NaN has neither."""
    token_ids: list[int | None]
    token_ids, is_usable = drawn()  # type: ignore[assignment]
    lists = logprobs() if logprobs else None
    if all(is_usable):
        return Samples(token_ids, [0] * len(token_ids), lists)
    num_nans = [0] * len(token_ids)
    # NaN and +infinity; a row without any allowed token counts in full.
    num_unusable = (raw.isnan() | raw.isposinf()).sum(dim=-1)
    counts = torch.where(scores.isneginf().all(dim=-1), raw.shape[1], num_unusable).tolist()
    for row in [row for row, has_token in enumerate(is_usable) if not has_token]:
        token_ids[row] = None
        num_nans[row] = max(1, counts[row])
        if lists is not None:
            lists.logprob_token_ids[row] = []
            lists.logprobs[row] = []
            lists.sampled_token_ranks[row] = 0
    return Samples(token_ids, num_nans, lists)


def best_or_drawn(draw: RandomDraw, scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """See Draw. Rows with temperature 0 take the best token, the lowest id among equals; ``draw`` draws the others'."""
    # NaN is best, and no number.
    if scores.device.type == "cpu":
        own = scores.numpy()  # numpy is ten times as fast as torch
        found = own.argmax(axis=-1)
        tokens = torch.from_numpy(found)
        is_number = torch.from_numpy(np.isfinite(own[np.arange(len(found)), found]))
    else:
        top = scores.max(dim=-1)
        tokens = top.indices
        is_number = top.values.isfinite()
    random_rows = [i for i, row in enumerate(rows) if row.sampling.temperature > 0]
    if random_rows:
        tokens[to_device(np.array(random_rows), scores.device)] = draw(scores, rows, random_rows)
    return torch.stack([tokens, is_number.to(torch.int64)])


def draw_by_torch(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """See Draw."""
    return best_or_drawn(random_by_torch, scores, rows)


def random_by_torch(scores: Tensor, rows: Sequence[SamplingRow], places: Sequence[int]) -> Tensor:
    """See RandomDraw. Groups rows, whatever their parameters."""
    at_once = max(1, _MAX_ELEMENTS_AT_ONCE[scores.device.type] // scores.shape[1])
    if len(rows) == len(places) <= at_once:  # most steps: nothing is copied by rows
        return _draw(scores, rows)
    parts = [places[start : start + at_once] for start in range(0, len(places), at_once)]
    return torch.cat(
        [_draw(scores[to_device(np.array(part), scores.device)], [rows[i] for i in part]) for part in parts]
    )


def _draw(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Sample a token of each row."""
    temperatures, min_ps, top_ks, top_ps, seeds, positions = zip(*map(_DRAWN_BY, rows), strict=True)
    weights = _weights(scores, temperatures)
    if any(min_ps):  # weights below the share p of the best token's weight become 0 (arXiv:2407.01082)
        least = to_device(np.array([round(p * WEIGHT_SCALE) for p in min_ps]), scores.device)
        weights.masked_fill_(weights < least[:, None], 0)
    _keep_top_k(weights, scores, top_ks)
    _keep_top_p(weights, top_ps)
    # Whole numbers that depend only on seed and position (law 6): on every machine, and in every batch, the same token.
    uniforms = uniform_bits_of(seeds, positions)
    return invert(weights, scaled(to_device(uniforms, scores.device), weights.sum(dim=-1)))


def scaled(uniforms: Tensor, totals: Tensor) -> Tensor:
    """Return ``uniform * total >> UNIFORM_BITS`` of whole numbers, exact for totals below 2**58.

    The product has up to 111 bits, so each factor is split into two parts.
    """
    upper = uniforms >> _LOW_BITS
    lower = uniforms & ((1 << _LOW_BITS) - 1)
    high = totals >> _LOW_TOTAL_BITS
    low = totals & ((1 << _LOW_TOTAL_BITS) - 1)
    middle = upper * low + (lower * high << 2) + (lower * low >> _LOW_BITS)
    return (upper * high << 3) + (middle >> (UNIFORM_BITS - _LOW_BITS))


def invert(weights: Tensor, targets: Tensor) -> Tensor:
    """Return per row of ``[num_rows, vocab_size]`` the first token up to which the weights sum to more than the target.

    A token of weight 0 is never found, for ``0 <= target < sum of the row``.
    """
    found = torch.searchsorted(weights.cumsum(dim=-1), targets[:, None], right=True)
    return found[:, 0]


def _weights(scores: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Return probabilities as whole numbers, int64; the best token of a row has 2**40."""
    temperature = to_device(np.array(temperatures, dtype=np.float64), scores.device)[:, None]
    wide = scores.to(torch.float64)
    distances = (wide - wide.amax(dim=-1, keepdim=True)) / temperature
    return (distances.exp() * WEIGHT_SCALE).round().to(torch.int64)


def _keep_top_k(weights: Tensor, scores: Tensor, limits: Sequence[int]) -> None:
    """Set all but the k best scores of a row to weight 0, in place; among equals the lowest ids stay."""
    asking = [i for i, k in enumerate(limits) if 0 < k < scores.shape[1]]
    if asking:
        places = to_device(np.array(asking), scores.device)
        counts = to_device(np.array([limits[i] for i in asking]), scores.device)[:, None]
        own = scores[places]
        best = own.topk(int(max(limits[i] for i in asking))).values
        weights[places] = weights[places].masked_fill(~_is_best(own, best, counts), 0)


def _keep_top_p(weights: Tensor, limits: Sequence[float]) -> None:
    """Keep the smallest set of best tokens that holds the share p of a row's weight, in place."""
    asking = [i for i, p in enumerate(limits) if p < 1.0]
    if asking:
        places = to_device(np.array(asking), weights.device)
        shares = to_device(np.array([limits[i] for i in asking]), weights.device)[:, None]
        own = weights[places]
        totals = own.sum(dim=-1, keepdim=True).to(torch.float64)
        best = _descending(own, (1.0 - shares) * totals / own.shape[1])
        before = best.cumsum(dim=-1) - best
        counts = (before.to(torch.float64) < shares * totals).sum(dim=-1, keepdim=True)
        weights[places] = own.masked_fill(~_is_best(own, best, counts.clamp(min=1)), 0)  # of NaN none is


def _is_best(values: Tensor, best: Tensor, counts: Tensor) -> Tensor:
    """Mark the ``counts`` best of each row, the lowest ids among equals. best: at least these, in order."""
    edge = best.gather(1, counts - 1)
    is_better = values > edge
    is_equal = values == edge
    num_equal = counts - is_better.sum(dim=-1, keepdim=True)
    return is_better | (is_equal & (is_equal.cumsum(dim=-1) <= num_equal))


def _descending(weights: Tensor, averages: Tensor) -> Tensor:
    """Return each row's weights in descending order, then zeros; weights below the row's average may be missing.

    Sorting them is most of the work on the host. averages ``[num_rows, 1]``: the average of the weight that a row may lose;
    tokens below it and after it in order always sum to more than that.
    """
    if weights.device.type != "cpu":
        return weights.sort(dim=-1, descending=True).values
    least = np.maximum(averages.floor().numpy(), 1.0)
    kept = [np.sort(row[row >= edge])[::-1] for row, edge in zip(weights.numpy(), least, strict=True)]
    best = np.zeros((len(kept), max(map(len, kept)) or 1), dtype=np.int64)
    for row, own in zip(best, kept, strict=True):
        row[: len(own)] = own
    return torch.from_numpy(best)


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int | None], num_alternatives: Sequence[int | None]
) -> LogprobsLists:
    """Return log-softmax in float32 of one token per row of ``logits [num_rows, vocab_size]``, and of the k best.

    A row without a token or without a k is empty.
    """
    tokens = to_device(np.array([token or 0 for token in token_ids], dtype=np.int64), logits.device)
    pairs = zip(token_ids, num_alternatives, strict=True)
    return _begin_logprobs(logits, tokens, [None if token is None else k for token, k in pairs])()


def _begin_logprobs(
    logits: Tensor, tokens: Tensor, num_alternatives: Sequence[int | None]
) -> Callable[[], LogprobsLists]:
    """Begin ``token_logprobs`` of tokens that are where the logits are; return what waits for it."""
    asking: dict[int, list[int]] = {}
    for row, k in enumerate(num_alternatives):
        if k is not None:
            asking.setdefault(min(k, logits.shape[1]), []).append(row)
    at_once = max(1, _MAX_ELEMENTS_AT_ONCE[logits.device.type] // logits.shape[1])
    parts = [
        (k, rows[start : start + at_once])
        for k, rows in asking.items()
        for start in range(0, len(rows), at_once)
    ]
    found = [_logprobs_of(logits, rows, tokens, k) for k, rows in parts]
    copied = begin_copy(torch.cat(found) if found else tokens[:0])
    return lambda: _logprob_lists(copied(), parts, len(num_alternatives))


def _logprob_lists(
    found: Sequence[float], parts: Sequence[tuple[int, Sequence[int]]], num_rows: int
) -> LogprobsLists:
    """Return the numbers of ``_logprobs_of``, part after part, by row. parts: (k, its rows)."""
    numbers = iter(found)
    lists = LogprobsLists([[] for _ in range(num_rows)], [[] for _ in range(num_rows)], [0] * num_rows)
    for k, rows in parts:
        for row in rows:
            lists.logprob_token_ids[row] = [int(token) for token in islice(numbers, 1 + k)]
            lists.logprobs[row] = list(islice(numbers, 1 + k))
            lists.sampled_token_ranks[row] = int(next(numbers))
    return lists


def _logprobs_of(logits: Tensor, rows: Sequence[int], all_tokens: Tensor, k: int) -> Tensor:
    """Return token ids, their log probabilities and the first one's rank, row after row; float64 holds all exactly."""
    places = to_device(np.array(rows, dtype=np.int64), logits.device)
    tokens = all_tokens[places].clamp(0, logits.shape[1] - 1)[:, None]
    logprobs = logits[places].to(torch.float32).log_softmax(dim=-1)
    best = logprobs.topk(k)
    own = logprobs.gather(1, tokens)
    ranks = (logprobs > own).sum(dim=-1, keepdim=True) + 1
    parts = (tokens, best.indices, own, best.values, ranks)
    return torch.cat([part.to(torch.float64) for part in parts], dim=1).flatten()
