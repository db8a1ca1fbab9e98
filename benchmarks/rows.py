"""The rows of ``benchmarks.engine``: what is asked of every engine, what the seconds mean, and how engines compare."""

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
"""The lower of two limits over the higher: with less between them the machine was not the same."""
_PREFILLS_OF_A_SAMPLE = 4


@dataclass(frozen=True)
class Sizes:
    """Tokens of the long prompts, of those that are decoded behind, and of their answers; vocab_size: of the model."""

    vocab_size: int
    long_prompt: int = 1024
    prompt: int = 128
    answer: int = 128


@dataclass(frozen=True)
class Row:
    """One measurement. batch: prompts at once; 0 is the prefill of a long one. A speed, or with ``is_time`` milliseconds."""

    name: str
    unit: str
    batch: int

    @property
    def is_time(self) -> bool:
        """Less is better."""
        return self.unit.startswith("ms")

    def sample(self, run: Callable[[Order], float], sizes: Sizes, rng: random.Random) -> float:
        """One figure. run: an order to the seconds that it took.

        Decoding is what an answer takes longer than its first token alone does.
        """
        if not self.batch:
            batches = [self._prompts(rng, sizes, 1, sizes.long_prompt) for _ in range(_PREFILLS_OF_A_SAMPLE)]
            return _PREFILLS_OF_A_SAMPLE * sizes.long_prompt / run(Order(batches, 1))
        first = run(Order([self._prompts(rng, sizes, self.batch, sizes.prompt)], 1))
        whole = run(Order([self._prompts(rng, sizes, self.batch, sizes.prompt)], sizes.answer))
        per_step = (whole - first) / (sizes.answer - 1)
        return per_step * 1000 if self.is_time else self.batch / per_step

    def limit(self, ceilings: Ceilings, weights: Weights) -> float:
        """The best figure that the machine allows."""
        if not self.batch:
            return ceilings.prompt_tokens_per_second(weights)
        per_step = ceilings.seconds_per_step(weights, self.batch)
        return per_step * 1000 if self.is_time else self.batch / per_step

    def over(self, ours: float, other: float) -> float:
        """How many times as good ours is."""
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
    """Where samples are taken: a machine whose neighbours take of its memory's speed what they like.

    number, flops: of this round.
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
        """One, with the limit of its own moment: the mean of those before and behind it, which are alike if it is quiet."""
        before = self._limit(row)
        with runner.turn(), watch_use() as use:
            value = row.sample(lambda order: float(runner.run(order)["seconds"]), sizes, rng)
        behind = self._limit(row)
        found, limit = sample(value, use), (before + behind) / 2
        return found | {
            "is_quiet": found["is_quiet"] and _are_alike(before, behind),
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
    """Samples of one turn, until one was not disturbed or ``max_repeats`` more were; which is which is told."""
    samples: list[dict[str, Any]] = []
    while not samples or (not samples[-1]["is_quiet"] and len(samples) <= max_repeats):
        samples.append(scene.sample(row, runner, sizes, rng))
    return samples


def compared(row: Row, found: Mapping[str, list[dict[str, Any]]], ours: str) -> dict[str, Any]:
    """What a row's figures say: every engine's share of its samples' limits, and ours over each of the others.

    The best of the others is the one over which ours is the least.
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
    """How many times as good ours is, round by round: only those in which both were quiet and had like limits, if any is."""
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
    """The share of tokens, place by place, that are those of the reference."""
    pairs = [
        pair
        for answer, other in zip(answers, reference, strict=True)
        for pair in zip(answer, other, strict=True)
    ]
    return sum(one == other for one, other in pairs) / len(pairs)
