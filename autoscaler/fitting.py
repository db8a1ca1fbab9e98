"""Fits a timing model to measured times."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from autoscaler.timing_model import PrefillTiming, StepTiming, TransferTiming
from contract.errors import SettingError

_TINY = 1e-12


@dataclass(frozen=True)
class PromptSample:
    """One prompt: its tokens, and the seconds of its computation and of the wait for its KV."""

    num_tokens: float
    prefill_seconds: float
    transfer_seconds: float


@dataclass(frozen=True)
class StepSample:
    """The seconds of a step over this many answers, which have ``context_tokens`` together."""

    num_answers: float
    context_tokens: float
    seconds: float


def fit_prefill(samples: Sequence[PromptSample]) -> PrefillTiming:
    """Return the polynomial that is nearest to the samples. Raises SettingError for prompts of fewer than two lengths."""
    if len({sample.num_tokens for sample in samples}) < 2:
        raise SettingError(
            "prompts of one length do not show how the time grows with it; measure several lengths"
        )
    rows = [(1.0, one.num_tokens, one.num_tokens**2) for one in samples]
    base, linear, squared = fit(rows, [one.prefill_seconds for one in samples])
    return PrefillTiming(base_seconds=base, seconds_per_token=linear, seconds_per_token_squared=squared)


def fit_transfer(samples: Sequence[PromptSample]) -> TransferTiming:
    """Return the line that is nearest to the samples. One sample at least must have a transfer; else all times are 0."""
    moved = [one for one in samples if one.transfer_seconds > 0]
    if not moved:
        return TransferTiming()
    base, linear = fit([(1.0, one.num_tokens) for one in moved], [one.transfer_seconds for one in moved])
    return TransferTiming(base_seconds=base, seconds_per_token=linear)


def fit_step(samples: Sequence[StepSample]) -> StepTiming:
    """Return the plane that is nearest to the samples. Raises SettingError for batches of one size only."""
    if len({sample.num_answers for sample in samples}) < 2:
        raise SettingError(
            "batches of one size do not show how the time grows with it; measure several sizes"
        )
    rows = [(1.0, one.context_tokens, one.num_answers) for one in samples]
    base, context, answer = fit(rows, [one.seconds for one in samples])
    return StepTiming(base_seconds=base, seconds_per_context_token=context, seconds_per_answer=answer)


def fit(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return coefficients of at least 0 for which rows · coefficients has the least squared relative error.

    The few columns allow trying every set of them that may be above 0 (non-negative least squares).
    """
    weights = [1.0 / max(value, _TINY) for value in values]
    num_columns = len(rows[0])
    best: tuple[float, list[float]] | None = None
    for size in range(1, num_columns + 1):
        for columns in combinations(range(num_columns), size):
            found = _least_squares(rows, values, weights, columns)
            if found is None or any(each < 0.0 for each in found):
                continue
            coefficients = [0.0] * num_columns
            for column, each in zip(columns, found, strict=True):
                coefficients[column] = each
            error = sum(
                (weight * (_product(row, coefficients) - value)) ** 2
                for row, value, weight in zip(rows, values, weights, strict=True)
            )
            if best is None or error < best[0] - _TINY:
                best = (error, coefficients)
    return best[1] if best else [0.0] * num_columns


def _least_squares(
    rows: Sequence[Sequence[float]],
    values: Sequence[float],
    weights: Sequence[float],
    columns: Sequence[int],
) -> list[float] | None:
    """Solve the normal equations of some columns, scaled to 1; None if they do not determine the coefficients."""
    scales = [max((abs(row[column]) for row in rows), default=0.0) or 1.0 for column in columns]
    scaled = [
        [weight * row[column] / scale for column, scale in zip(columns, scales, strict=True)]
        for row, weight in zip(rows, weights, strict=True)
    ]
    targets = [weight * value for weight, value in zip(weights, values, strict=True)]
    size = len(columns)
    matrix = [[sum(row[i] * row[j] for row in scaled) for j in range(size)] for i in range(size)]
    right = [sum(row[i] * target for row, target in zip(scaled, targets, strict=True)) for i in range(size)]
    solved = _solve(matrix, right)
    return None if solved is None else [each / scale for each, scale in zip(solved, scales, strict=True)]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve a small system by elimination with pivots; None if it is singular."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    largest = max((abs(each) for row in matrix for each in row), default=0.0)
    for column in range(size):
        pivot = max(range(column, size), key=lambda index: abs(rows[index][column]))
        if abs(rows[pivot][column]) <= _TINY * largest:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for index in range(size):
            if index != column:
                factor = rows[index][column] / rows[column][column]
                rows[index] = [
                    one - factor * other for one, other in zip(rows[index], rows[column], strict=True)
                ]
    return [rows[index][size] / rows[index][index] for index in range(size)]


def _product(row: Sequence[float], coefficients: Sequence[float]) -> float:
    return sum(one * other for one, other in zip(row, coefficients, strict=True))
