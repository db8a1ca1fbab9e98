"""Feed-forward: the workers that a rate of arrivals needs, from the timing model alone."""

import math
from dataclasses import dataclass, field, replace

from autoscaler.forecast import Expected
from autoscaler.policy import Goals
from autoscaler.signals import LoadSignals
from autoscaler.timing_model import TimingModel
from contract.identity import Role

_LEAST_LOAD = 0.3
_MOST_LOAD = 0.9
_MOST_WORKERS = 1000
_FULL_BATCH = 0.9
"""The part of the batch that is used in the mean: arrivals are random."""
_KV_MARGIN = 1.1
_SLACK_FACTOR = 2.0
"""A goal for first tokens is at least this multiple of the time of a long prompt alone: no number of workers is faster."""
_STEP_FACTOR = 1.25
_CORRECTION_GAIN = 0.1
_MOST_CORRECTION = 2.0
_AT_BOUND = 0.99
_MOST_OF_A_GUESS = 100.0
"""The bound of a correction where nothing was measured: a guess may be wrong by an order of magnitude."""
_PLAUSIBLE = 10.0
"""A worker's time lies within 1/10 to 10 times that of a measured model."""
_P90_OF_NORMAL = 1.2816


@dataclass(frozen=True)
class Corrections:
    """Factors by which measured times differ from the model's, as moving means.

    A measured model is corrected between 0.5 and 2. A guess is replaced by the mean of the readings that there are, as the
    first one is more certain than the guess. num_prefill, num_step: readings until now. doubted: pools whose last reading
    was dropped.
    """

    prefill: float = 1.0
    step: float = 1.0
    num_prefill: int = 0
    num_step: int = 0
    doubted: frozenset[Role] = field(default=frozenset(), compare=False)

    def with_reading(self, timing: TimingModel, load: LoadSignals, answers_each: float) -> "Corrections":
        """Return the factors after one more reading. answers_each: answers that each decode worker continues.

        A reading is dropped that lies outside 1/10 to 10 times the time of a measured model, since no worker is that fast
        or slow; outside 1/1000 to 1000 times where the model is a guess.
        """
        changed = self
        tokens = load.uncached_prompt_tokens
        if load.prefill_seconds_per_token and tokens > 0:
            predicted = timing.prefill.seconds(tokens, squared_variation(load)) / tokens
            observed = load.prefill_seconds_per_token / predicted if predicted else math.inf
            if is_plausible := _is_plausible(timing, observed):
                factor = _moved(timing, self.prefill, self.num_prefill, observed)
                changed = replace(changed, prefill=factor, num_prefill=self.num_prefill + 1)
            changed = changed.with_doubt(Role.PREFILL, not is_plausible)
        # A mean below one answer does not show which batches the reported steps had.
        if load.step_seconds and answers_each >= 1.0:
            predicted = timing.step_seconds(answers_each, answers_each * mean_context(load))
            observed = load.step_seconds / predicted if predicted else math.inf
            if is_plausible := _is_plausible(timing, observed):
                factor = _moved(timing, self.step, self.num_step, observed)
                changed = replace(changed, step=factor, num_step=self.num_step + 1)
            changed = changed.with_doubt(Role.DECODE, not is_plausible)
        return changed

    def with_doubt(self, role: Role, is_doubted: bool) -> "Corrections":
        """Return the factors after a reading of a pool that was dropped, or was not."""
        return replace(self, doubted=self.doubted | {role} if is_doubted else self.doubted - {role})


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The workers that each pool needs, as real numbers, and what they were calculated from.

    batch: answers of a full decode worker. prompts: those that a prefill worker computes at once. goals: those of the
    policy, or longer ones where no pool could meet them. prompt_seconds: time of a long prompt (90th percentile) alone.
    step_seconds: time of a step for one answer alone. expected: the rate of requests. corrections: the factors with which
    they were; most_correction: the bound of these.
    """

    prefill: float
    decode: float
    batch: int
    prompts: int = 1
    goals: Goals
    prompt_seconds: float
    step_seconds: float
    expected: Expected
    corrections: Corrections
    most_correction: float

    def correction(self, role: Role) -> float:
        """Return the factor by which the measured times of a pool differ from the model's."""
        return self.corrections.prefill if role is Role.PREFILL else self.corrections.step

    def is_correction_bounded(self, role: Role) -> bool:
        """Return True if the pool is sized by times that are not those measured.

        The factor is at its bound, or the last reading was dropped.
        """
        if role in self.corrections.doubted:
            return True
        factor = self.correction(role)
        return max(factor, 1.0 / factor) >= _AT_BOUND * self.most_correction

    def in_groups(self, prefill_size: int, decode_size: int) -> "Demand":
        """Return the same demand in data-parallel groups of so many of these workers."""
        return replace(
            self,
            prefill=self.prefill / prefill_size,
            decode=self.decode / decode_size,
            batch=self.batch * decode_size,
            prompts=self.prompts * prefill_size,
        )

    def of(self, role: Role) -> float:
        """Return the workers that a pool needs."""
        return self.prefill if role is Role.PREFILL else self.decode


def demand(
    timing: TimingModel, goals: Goals, load: LoadSignals, expected: Expected, corrections: Corrections
) -> Demand:
    """Return the workers that the expected requests need, of the lengths that ``load`` has."""
    rate = expected.rate
    variation = squared_variation(load)
    long_prompt = corrections.prefill * timing.prefill.seconds(
        max(load.uncached_prompt_tokens_p90, load.uncached_prompt_tokens)
    )
    context = mean_context(load)
    alone = corrections.step * timing.step_seconds(1, context)
    # Without this a goal that one prompt or one step alone misses would ask for ever more workers.
    reachable = Goals(
        ttft=max(goals.ttft, _SLACK_FACTOR * long_prompt), itl=max(goals.itl, _STEP_FACTOR * alone)
    )
    service = corrections.prefill * timing.prefill.seconds(load.uncached_prompt_tokens, variation)
    patience = reachable.ttft - long_prompt - timing.transfer.seconds(load.prompt_tokens)
    batch = largest_batch(timing, reachable.itl / corrections.step, context)
    step = corrections.step * timing.step_seconds(batch, batch * context)
    return Demand(
        prefill=prefill_workers(rate * service, service, variation, patience),
        decode=rate * load.answer_tokens * step / (batch * _FULL_BATCH),
        batch=batch,
        goals=reachable,
        prompt_seconds=long_prompt,
        step_seconds=alone,
        expected=expected,
        corrections=corrections,
        most_correction=most_correction(timing),
    )


def prefill_workers(offered: float, service: float, variation: float, patience: float) -> float:
    """Return the workers with which nine of ten prompts wait no longer than ``patience`` seconds, as a real number.

    offered: busy workers in the mean. The prefill workers are taken for an M/G/n queue, because the router binds a prompt
    to the worker that has the least to do. Its waiting time is nearly exponential: P(W > t) = ρ·exp(-t·n·(1-ρ)/r), with the
    mean rest r of a prompt that is being computed. Between two whole numbers the result is interpolated.
    """
    rest = service * (1.0 + variation) / 2.0
    below = 0.0
    for number in range(1, _MOST_WORKERS):
        load = _load_within(patience * number / rest) if rest > 0.0 else _MOST_LOAD
        suffices_for = load * number
        if offered <= suffices_for:
            return number - 1 + (offered - below) / (suffices_for - below)
        below = suffices_for
    return offered / _MOST_LOAD


def _load_within(patience: float) -> float:
    """Return the greatest load at which the 90th percentile of the wait is ``patience``, in mean rests of a worker."""
    low = _LEAST_LOAD
    high = _MOST_LOAD
    for _ in range(20):  # halves the interval to a millionth: the left side grows with the load
        middle = (low + high) / 2.0
        if math.log(10.0 * middle) / (1.0 - middle) <= patience:
            low = middle
        else:
            high = middle
    return low


def largest_batch(timing: TimingModel, step_bound: float, context: float) -> int:
    """Return the most answers that a worker continues in steps of at most ``step_bound`` seconds, and holds; at least 1.

    context: mean tokens of an answer with its prompt, halfway.
    """
    held = int(timing.kv_tokens / max(context, 1.0) / _KV_MARGIN)
    most = max(1, min(timing.max_answers, held))
    low = 1
    while low < most:
        middle = (low + most + 1) // 2
        if timing.step_seconds(middle, middle * context) <= step_bound:
            low = middle
        else:
            most = middle - 1
    return low


def mean_context(load: LoadSignals) -> float:
    """Return the tokens that an answer has halfway, with its prompt."""
    return load.prompt_tokens + load.answer_tokens / 2.0


def squared_variation(load: LoadSignals) -> float:
    """Return the squared coefficient of variation of prompt lengths, estimated from their mean and 90th percentile."""
    if load.uncached_prompt_tokens <= 0:
        return 0.0
    excess = load.uncached_prompt_tokens_p90 / load.uncached_prompt_tokens - 1.0
    return float(min(2.0, max(0.0, excess / _P90_OF_NORMAL)) ** 2)


def most_correction(timing: TimingModel) -> float:
    """Return the bound of a correction: it lies between this factor and its inverse."""
    return _MOST_OF_A_GUESS if timing.is_guess else _MOST_CORRECTION


def _is_plausible(timing: TimingModel, observed: float) -> bool:
    """Return False for a time that differs so much from the model's that its worker is at fault."""
    most = _PLAUSIBLE * (_MOST_OF_A_GUESS if timing.is_guess else 1.0)
    return 1.0 / most <= observed <= most


def _moved(timing: TimingModel, factor: float, num_readings: int, observed: float) -> float:
    """Return a factor after one more reading, the first of which replaces a guess."""
    most = most_correction(timing)
    gain = max(_CORRECTION_GAIN, 1.0 / (num_readings + 1)) if timing.is_guess else _CORRECTION_GAIN
    return min(most, max(1.0 / most, factor + gain * (min(observed, 2.0 * most) - factor)))
