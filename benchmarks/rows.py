"""The rows of ``benchmarks.engine``: what is asked of every engine, what the seconds mean, and how engines compare."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.ceilings import Ceilings, Weights
from benchmarks.others import watch_use
from benchmarks.runners import Order, Runner, random_prompts
from benchmarks.samples import sample

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


def quiet_sample(
    row: Row, runner: Runner, sizes: Sizes, rng: random.Random, max_repeats: int
) -> list[dict[str, Any]]:
    """Samples of one turn, until one was not disturbed or ``max_repeats`` more were; which is which is told."""
    samples: list[dict[str, Any]] = []
    while not samples or (not samples[-1]["is_quiet"] and len(samples) <= max_repeats):
        with runner.turn(), watch_use() as use:
            value = row.sample(lambda order: float(runner.run(order)["seconds"]), sizes, rng)
        samples.append(sample(value, use))
    return samples


def compared(row: Row, found: Mapping[str, dict[str, Any]], ours: str, limit: float) -> dict[str, Any]:
    """What a row's figures say: every engine's share of the limit, and ours over the best of the others."""
    medians = {name: one["median"] for name, one in found.items()}
    others = {name: median for name, median in medians.items() if name != ours}
    best = (min if row.is_time else max)(others, key=lambda name: others[name], default=None)
    return {
        "unit": row.unit,
        "limit": limit,
        "share_of_limit": {name: row.over(median, limit) for name, median in medians.items()},
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
