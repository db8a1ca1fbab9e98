"""The times of a worker's steps, as formulas with a few coefficients: the file that holds them, a guess, and their fit.

A prompt of n tokens takes a + b·n + c·n². A step that continues answers takes a + b·(context tokens of all) + c·(answers),
with other coefficients from some number of answers on (the shape of DistServe's model, Zhong et al. 2024). A hand-over takes
a latency and a time for each token.

``fit_prefill``, ``fit_step`` and ``fit_transfer`` make coefficients of measured times (``kvbaton bench --profile``). A
service that was never measured begins with ``default_timing``, a guess by the size of its weights and the kind of its
device. It may be wrong by an order of magnitude. It lets the law decide from the first second; the readings of the running
service then replace its scale (``demand.Corrections``), and the workers report their sizes themselves.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, structs

from autoscaler.signals import PoolSignals
from contract.decoding import DECODING_ERRORS, json_decoder
from contract.errors import SettingError

_CPU_BYTES_PER_SECOND = 10e9
"""Weights that a few cores read in a second: each step reads all of them once."""
_GPU_BYTES_PER_SECOND = 1e12
_CPU_PROMPT_BYTES_PER_SECOND = 50e9
"""The product of weights and prompt tokens that a few cores compute in a second: two operations for two bytes."""
_GPU_PROMPT_BYTES_PER_SECOND = 200e12
_LOADED_BYTES_PER_SECOND = 200e6
_START_SECONDS = 15.0
"""Time of a start without the weights: imports, devices, warm-up."""
_BASE_SECONDS = 0.005
_TOKEN_SECONDS = 2e-5
_ANSWERS = 32
_KV_TOKENS = 32_768
_TINY = 1e-12

Seconds = Annotated[float, Meta(ge=0.0)]
Count = Annotated[int, Meta(ge=1)]


class PrefillTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of computing a prompt."""

    base_seconds: Seconds
    seconds_per_token: Seconds
    seconds_per_token_squared: Seconds = 0.0

    def seconds(self, num_tokens: float, squared_variation: float = 0.0) -> float:
        """Return the mean time of prompts of ``num_tokens`` in the mean.

        squared_variation: variance of their lengths, divided by the square of the mean.
        """
        squared = num_tokens**2 * (1.0 + squared_variation)
        return (
            self.base_seconds + self.seconds_per_token * num_tokens + self.seconds_per_token_squared * squared
        )


class StepTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of a step that continues ``from_batch`` answers or more."""

    from_batch: Count = 1
    base_seconds: Seconds
    seconds_per_context_token: Seconds
    seconds_per_answer: Seconds


class TransferTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time for which an answer waits for the KV of its prompt."""

    base_seconds: Seconds = 0.0
    seconds_per_token: Seconds = 0.0

    def seconds(self, num_tokens: float) -> float:
        """Return the time of a prompt of ``num_tokens``."""
        return self.base_seconds + self.seconds_per_token * num_tokens


class TimingModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The times of one model on one kind of worker.

    kv_tokens: tokens that the KV pool of a worker holds. max_answers: answers that it decodes at once. start_seconds: from
    the order to start a worker to its first credit. origin: how the figures were obtained; "default" ones are a guess by the
    size of the model, which the law corrects without narrow bounds. description: free text about the model, the device and
    the load of the measurement.
    """

    format: Literal["kvbaton-timing/1"] = "kvbaton-timing/1"
    origin: Literal["measured", "modelled", "default"] = "modelled"
    description: str = ""
    prefill: PrefillTiming
    decode: Annotated[tuple[StepTiming, ...], Meta(min_length=1)]
    transfer: TransferTiming = TransferTiming()
    kv_tokens: Count
    max_answers: Count
    start_seconds: Annotated[float, Meta(gt=0.0)]

    @property
    def is_guess(self) -> bool:
        """True if nothing was measured, and only readings of the running service show the times."""
        return self.origin == "default"

    def step_seconds(self, num_answers: float, context_tokens: float) -> float:
        """Return the time of a step over answers that have ``context_tokens`` together; 0 without answers."""
        if num_answers <= 0:
            return 0.0
        piece = self.decode[0]
        for later in self.decode[1:]:
            if num_answers >= later.from_batch:
                piece = later
        return (
            piece.base_seconds
            + piece.seconds_per_context_token * context_tokens
            + piece.seconds_per_answer * num_answers
        )

    def check(self) -> None:
        """Raise SettingError if the pieces of the decode step are not in order from 1 on."""
        starts = [piece.from_batch for piece in self.decode]
        if starts[0] != 1 or sorted(set(starts)) != starts:
            raise SettingError(
                f"decode has pieces from {starts} answers on; the first must begin at 1, and each later one above the last"
            )


_DECODER: msgspec.json.Decoder[TimingModel] = json_decoder(TimingModel)


def read_timing(path: Path) -> TimingModel:
    """Read a timing file. Raises SettingError, which names the file and the field, if it cannot be used."""
    try:
        model = _DECODER.decode(path.read_bytes())
        model.check()
    except OSError as error:
        raise SettingError(f"timing file {path} cannot be read: {error.strerror}") from error
    except DECODING_ERRORS as error:
        raise SettingError(f"timing file {path} cannot be used: {error}") from error
    except SettingError as error:
        raise SettingError(f"timing file {path} cannot be used: {error.message}") from error
    return model


def write_timing(path: Path, model: TimingModel) -> None:
    """Write a timing file, readable by people. Raises SettingError if the model or the path cannot be used."""
    model.check()
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(model), indent=2) + b"\n")
    except OSError as error:
        raise SettingError(f"timing file {path} cannot be written: {error.strerror}") from error


def default_timing(weight_bytes: int, *, has_gpu: bool) -> TimingModel:
    """Return the guess for a model with weights of this size; 0 if it is not known."""
    step = weight_bytes / (_GPU_BYTES_PER_SECOND if has_gpu else _CPU_BYTES_PER_SECOND)
    token = weight_bytes / (_GPU_PROMPT_BYTES_PER_SECOND if has_gpu else _CPU_PROMPT_BYTES_PER_SECOND)
    return TimingModel(
        origin="default",
        description=f"a guess for {weight_bytes / 1e9:.2f} GB of weights on a {'GPU' if has_gpu else 'CPU'}",
        prefill=PrefillTiming(base_seconds=_BASE_SECONDS + step, seconds_per_token=_TOKEN_SECONDS + token),
        decode=(
            StepTiming(
                base_seconds=_BASE_SECONDS + step,
                seconds_per_context_token=0.0,
                seconds_per_answer=_TOKEN_SECONDS + token,
            ),
        ),
        transfer=TransferTiming(base_seconds=_BASE_SECONDS),
        kv_tokens=_KV_TOKENS,
        max_answers=_ANSWERS,
        start_seconds=_START_SECONDS + weight_bytes / _LOADED_BYTES_PER_SECOND,
    )


def with_sizes(timing: TimingModel, decode: PoolSignals, data_parallel_size: int = 1) -> TimingModel:
    """Return a guess with the sizes that the ready decode workers have; a measured model, or one without them, as it is.

    data_parallel_size: ranks of each worker, if it is a group; the sizes are those of a rank.
    """
    if not timing.is_guess or not decode.num_ready or not decode.max_in_flight:
        return timing
    num_ranks = decode.num_ready * data_parallel_size
    return structs.replace(
        timing,
        max_answers=max(1, decode.max_in_flight // num_ranks),
        kv_tokens=max(1, decode.max_tokens // num_ranks) if decode.max_tokens else timing.kv_tokens,
    )


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
    # By hand, since a router's installation, which has `kvbaton bench`, has no numpy.
    weights = [1.0 / max(value, _TINY) for value in values]
    num_columns = len(rows[0])
    # Squares of token counts are a million times the constant column: unscaled, no pivot would be exact.
    scales = [max(abs(row[column]) for row in rows) or 1.0 for column in range(num_columns)]
    table = [
        [weight * each / scale for each, scale in zip(row, scales, strict=True)]
        for row, weight in zip(rows, weights, strict=True)
    ]
    targets = [weight * value for weight, value in zip(weights, values, strict=True)]
    products = [
        [sum(row[i] * row[j] for row in table) for j in range(num_columns)] for i in range(num_columns)
    ]
    right = [
        sum(row[i] * target for row, target in zip(table, targets, strict=True)) for i in range(num_columns)
    ]
    best = [0.0] * num_columns
    least = math.inf
    for size in range(1, num_columns + 1):
        for columns in combinations(range(num_columns), size):
            found = _solve([[products[i][j] for j in columns] for i in columns], [right[i] for i in columns])
            if found is None or any(each < 0.0 for each in found):
                continue  # these samples do not determine the coefficients, or a time would shrink with the tokens
            by_column = dict(zip(columns, found, strict=True))
            coefficients = [by_column.get(column, 0.0) for column in range(num_columns)]
            error = sum(
                (sum(map(operator.mul, row, coefficients)) - target) ** 2
                for row, target in zip(table, targets, strict=True)
            )
            if error < least - _TINY:  # a set with more columns must fit better, and not only as well
                least = error
                best = coefficients
    return [each / scale for each, scale in zip(best, scales, strict=True)]


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
