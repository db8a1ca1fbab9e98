"""The rows of ``benchmarks.engine``: the orders, the meaning of their seconds, and the comparison of engines."""

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.ceilings import Ceilings, Machine, Weights
from benchmarks.others import watch_use
from benchmarks.runners import Order, Runner, random_prompts
from benchmarks.samples import median_of, sample, summary

LEAST_ALIKE = 0.85
"""Minimum ratio of two limits: below it the machine's state was different."""
_PREFILLS_OF_A_SAMPLE = 4


@dataclass(frozen=True)
class Sizes:
    """Lengths of the long prompts, of the prompts for decoding, and of their answers; vocab_size: that of the model."""

    vocab_size: int
    long_prompt: int = 1024
    prompt: int = 128
    answer: int = 128


@dataclass(frozen=True)
class Row:
    """One measurement. batch: concurrent prompts; 0: one long prefill. A speed, or with ``is_time`` milliseconds."""

    name: str
    unit: str
    batch: int

    @property
    def is_time(self) -> bool:
        """True if less is better."""
        return self.unit.startswith("ms")

    def sample(self, run: Callable[[Order], float], sizes: Sizes, rng: random.Random) -> float:
        """Measure one figure. run: maps an order to its seconds.

        The time of decoding is that of an answer minus that of its first token alone.
        """
        if not self.batch:
            batches = [self._prompts(rng, sizes, 1, sizes.long_prompt) for _ in range(_PREFILLS_OF_A_SAMPLE)]
            return _PREFILLS_OF_A_SAMPLE * sizes.long_prompt / run(Order(batches, 1))
        first = run(Order([self._prompts(rng, sizes, self.batch, sizes.prompt)], 1))
        whole = run(Order([self._prompts(rng, sizes, self.batch, sizes.prompt)], sizes.answer))
        per_step = (whole - first) / (sizes.answer - 1)
        return per_step * 1000 if self.is_time else self.batch / per_step

    def limit(self, ceilings: Ceilings, weights: Weights) -> float:
        """Return the best figure that the machine allows."""
        if not self.batch:
            return ceilings.prompt_tokens_per_second(weights)
        per_step = ceilings.seconds_per_step(weights, self.batch)
        return per_step * 1000 if self.is_time else self.batch / per_step

    def over(self, ours: float, other: float) -> float:
        """Return the factor by which ours is better."""
        return other / ours if self.is_time else ours / other

    @staticmethod
    def _prompts(rng: random.Random, sizes: Sizes, count: int, length: int) -> list[list[int]]:
        return random_prompts(rng, count, length, sizes.vocab_size)


ROWS = (
    Row("prefill", "prompt tokens/s", 0),
    Row("single stream", "ms per token", 1),
    Row("8 at once", "tokens/s", 8),
    Row("32 at once", "tokens/s", 32),
)


@dataclass
class Scene:
    """The machine on which samples are taken, whose memory bandwidth other tenants use too.

    number, flops: those of this round.
    """

    machine: Machine
    weights: Weights
    number: int = -1
    flops: float = 0.0

    def begin_round(self) -> Ceilings:
        """Measure both limits."""
        self.number += 1
        self.flops = self.machine.flops()
        return Ceilings(self.machine.read_bytes(), self.flops)

    def sample(self, row: Row, runner: Runner, sizes: Sizes, rng: random.Random) -> dict[str, Any]:
        """Take a sample with its limit: the mean of the limits before and after it, which are similar if undisturbed."""
        before = self._limit(row)
        with runner.turn(), watch_use() as use:
            value = row.sample(lambda order: float(runner.run(order)["seconds"]), sizes, rng)
        after = self._limit(row)
        found = sample(value, use)
        limit = (before + after) / 2
        return found | {
            "is_quiet": found["is_quiet"] and _are_alike(before, after),
            "round": self.number,
            "limit": limit,
            "share_of_limit": row.over(value, limit),
        }

    def _limit(self, row: Row) -> float:
        read_bytes = self.machine.read_bytes() if row.batch else 1.0
        return row.limit(Ceilings(read_bytes, self.flops), self.weights)


def _are_alike(one: float, other: float) -> bool:
    return min(one, other) >= LEAST_ALIKE * max(one, other)


def quiet_sample(
    row: Row, runner: Runner, sizes: Sizes, rng: random.Random, max_repeats: int, scene: Scene
) -> list[dict[str, Any]]:
    """Take samples until one is undisturbed, at most ``max_repeats`` more; each is marked."""
    samples: list[dict[str, Any]] = []
    while not samples or (not samples[-1]["is_quiet"] and len(samples) <= max_repeats):
        samples.append(scene.sample(row, runner, sizes, rng))
    return samples


def compared(row: Row, found: Mapping[str, list[dict[str, Any]]], ours: str) -> dict[str, Any]:
    """Return every engine's share of its samples' limits, and ours over each of the others.

    The best of the others is the one with the lowest ratio.
    """
    over = {name: _over(row, found[ours], samples) for name, samples in found.items() if name != ours}
    best = min(over, key=lambda name: over[name]["median"], default=None)
    return {
        "unit": row.unit,
        "limit": median_of(found[ours], "limit"),
        "share_of_limit": {name: median_of(samples, "share_of_limit") for name, samples in found.items()},
        "over": over,
        "best_peer": best,
        "over_best_peer": None if best is None else over[best]["median"],
        "engines": {name: summary(samples) for name, samples in found.items()},
    }


def _over(row: Row, ours: list[dict[str, Any]], others: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the ratio of ours by rounds; if possible only undisturbed rounds with similar limits."""
    last_ours, last_others = ({one["round"]: one for one in samples} for samples in (ours, others))
    pairs = [(last_ours[number], last_others[number]) for number in last_ours if number in last_others]
    fair = [
        (one, other)
        for one, other in pairs
        if one["is_quiet"] and other["is_quiet"] and _are_alike(one["limit"], other["limit"])
    ]
    ratios = [row.over(one["value"], other["value"]) for one, other in fair or pairs]
    return {"median": statistics.median(ratios), "is_fair": bool(fair), "ratios": ratios}


def share_equal(answers: list[list[int]], reference: list[list[int]]) -> float:
    """Return the share of tokens that are equal to the reference at the same position."""
    pairs = [
        pair
        for answer, other in zip(answers, reference, strict=True)
        for pair in zip(answer, other, strict=True)
    ]
    return sum(one == other for one, other in pairs) / len(pairs)
