"""The rows of ``benchmarks.engine``: what is asked of every engine, what the seconds mean, and how engines compare."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.ceilings import Ceilings, Machine, Weights
from benchmarks.others import watch_use
from benchmarks.runners import Order, Runner, random_prompts
from benchmarks.samples import median_of, sample

LEAST_READ = 0.85
"""Of the best that memory has given in this run: with less of it no sample counts for which it decides."""
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

    def is_memorys(self, ceilings: Ceilings, weights: Weights) -> bool:
        """How fast memory is read decides."""
        return bool(self.batch) and ceilings.is_memorys(weights, self.batch)

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

    flops: of this round. best_read: bytes per second, the most that was seen so far.
    """

    machine: Machine
    weights: Weights
    flops: float = 0.0
    best_read: float = 0.0

    def begin_round(self) -> Ceilings:
        """Measure both limits."""
        self.flops = self.machine.flops()
        return Ceilings(self.read(), self.flops)

    def read(self) -> float:
        """Measure how fast memory is read now."""
        found = self.machine.read_bytes()
        self.best_read = max(self.best_read, found)
        return found

    def sample(self, row: Row, runner: Runner, sizes: Sizes, rng: random.Random) -> dict[str, Any]:
        """One, with the limit of its own moment: the mean of what memory gave before and behind it."""
        before = self.read()
        with runner.turn(), watch_use() as use:
            value = row.sample(lambda order: float(runner.run(order)["seconds"]), sizes, rng)
        behind = self.read()
        ceilings = Ceilings((before + behind) / 2, self.flops)
        limit = row.limit(ceilings, self.weights)
        found = sample(value, use) | {
            "limit": limit,
            "share_of_limit": row.over(value, limit),
            "least_read_bytes": min(before, behind),
            "is_memorys": row.is_memorys(ceilings, self.weights),
        }
        return self.judged(found)

    def judged(self, found: dict[str, Any]) -> dict[str, Any]:
        """The sample is not quiet if memory decides, and gave less than ``LEAST_READ`` of its best around it."""
        is_starved = found["is_memorys"] and found["least_read_bytes"] < LEAST_READ * self.best_read
        return found | {"is_quiet": found["is_quiet"] and not is_starved}


def quiet_sample(
    row: Row, runner: Runner, sizes: Sizes, rng: random.Random, max_repeats: int, scene: Scene
) -> list[dict[str, Any]]:
    """Samples of one turn, until one was not disturbed or ``max_repeats`` more were; which is which is told."""
    samples: list[dict[str, Any]] = []
    while not samples or (not samples[-1]["is_quiet"] and len(samples) <= max_repeats):
        samples.append(scene.sample(row, runner, sizes, rng))
    return samples


def compared(row: Row, found: Mapping[str, dict[str, Any]], ours: str) -> dict[str, Any]:
    """What a row's figures say: every engine's share of its samples' limits, and ours over the best of the others."""
    medians = {name: one["median"] for name, one in found.items()}
    others = {name: median for name, median in medians.items() if name != ours}
    best = (min if row.is_time else max)(others, key=lambda name: others[name], default=None)
    return {
        "unit": row.unit,
        "limit": median_of(found[ours]["samples"], "limit"),
        "share_of_limit": {name: median_of(one["samples"], "share_of_limit") for name, one in found.items()},
        "best_peer": best,
        "over_best_peer": None if best is None else row.over(medians[ours], others[best]),
        "engines": dict(found),
    }


def share_equal(answers: list[list[int]], reference: list[list[int]]) -> float:
    """The share of tokens, place by place, that are those of the reference."""
    pairs = [
        pair
        for answer, other in zip(answers, reference, strict=True)
        for pair in zip(answer, other, strict=True)
    ]
    return sum(one == other for one, other in pairs) / len(pairs)
