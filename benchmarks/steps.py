"""``python -m benchmarks.steps --model DIR``: how much of a decode step is spent outside the model.

One engine in this process with the shipped defaults decodes 1, 8 and 32 requests. Inside the model is what the kernels take
for the layers and the logits; outside is all the rest of the step: scheduling, inputs, sampling, taking in what was drawn.
To ``results/steps_<model>.json``.
"""

import argparse
import json
import logging
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from benchmarks.facts import RESULTS, command_line, write_result
from benchmarks.others import watch_use
from benchmarks.samples import sample, summary
from contract.requests import EngineRequest, SamplingParams
from engine.core import EngineCore
from engine.kernels.binding import Kernels
from engine.settings import EngineSettings

SIZES = (1, 8, 32)
_MODEL_CALLS = ("wait", "linear")
_FIRST_STEPS = 4
_PROMPT = 128


class Inside:
    """Seconds that the kernels took since they were asked last."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def take(self) -> float:
        """Asked between two steps."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, which counts."""

        @wraps(call)
        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = call(*arguments)
            self._seconds += time.perf_counter() - begin
            return result

        return timed


@contextmanager
def watching() -> Iterator[Inside]:
    """All kernels of this process are timed meanwhile."""
    inside, calls = Inside(), {name: getattr(Kernels, name) for name in _MODEL_CALLS}
    for name, call in calls.items():
        setattr(Kernels, name, inside.timed(call))
    try:
        yield inside
    finally:
        for name, call in calls.items():
            setattr(Kernels, name, call)


def measure_steps(
    model: Path, num_threads: int, num_steps: int, rounds: int, vocab_size: int
) -> dict[str, Any]:
    """Of each size: milliseconds of a step, and of it outside the model; medians of a round are its samples."""
    settings = EngineSettings(model=model, dtype="bfloat16", num_threads=num_threads)
    rng, found = random.Random(1), dict[str, Any]()
    with watching() as inside:
        core = EngineCore(settings)
        try:
            for size in SIZES:
                taken = [_round(core, inside, size, num_steps, vocab_size, rng) for _ in range(rounds)]
                whole, outside = (summary([pair[part] for pair in taken]) for part in (0, 1))
                share = outside["median"] / whole["median"]
                found[str(size)] = {"step_ms": whole, "outside_ms": outside, "share_outside": share}
        finally:
            core.close()
    return found


def _round(
    core: EngineCore, inside: Inside, size: int, num_steps: int, vocab_size: int, rng: random.Random
) -> tuple[dict[str, Any], dict[str, Any]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=num_steps + _FIRST_STEPS, ignore_eos=True)
    for number in range(size):
        prompt = [rng.randrange(vocab_size) for _ in range(_PROMPT)]
        core.add_request(EngineRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
    steps, outside = list[float](), list[float]()
    with watch_use() as use:
        while core.needs_step():
            inside.take()
            begin = time.perf_counter()
            core.step()
            seconds = time.perf_counter() - begin
            steps.append(1000 * seconds)
            outside.append(1000 * (seconds - inside.take()))
    decodes = slice(_FIRST_STEPS, -2)  # neither prompts nor the step that only ends requests
    return sample(statistics.median(steps[decodes]), use), sample(statistics.median(outside[decodes]), use)


def table(figures: dict[str, Any]) -> str:
    """The figures as Markdown."""
    head = f"| threads: {figures['num_threads']} | a step, ms | outside the model, ms | share |\n| --- | --- | --- | --- |\n"
    rows = [
        f"| {size} at once | {one['step_ms']['median']:.2f} | {one['outside_ms']['median']:.2f}"
        f" | {one['share_outside']:.1%} |"
        for size, one in figures["sizes"].items()
    ]
    return head + "\n".join(rows)


def main() -> None:
    """Measure, write the figures, print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of a checkpoint")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--steps", type=int, default=120, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the figures")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    vocab_size = json.loads((given.model / "config.json").read_text())["vocab_size"]
    sizes = measure_steps(given.model, given.threads, given.steps, given.rounds, vocab_size)
    figures = {
        "command": command_line("benchmarks.steps"),
        "model": given.model.name,
        "num_threads": given.threads,
        "sizes": sizes,
    }
    path = write_result(f"steps_{given.model.name}", figures, given.results)
    sys.stdout.write(f"{table(figures)}\n{path}\n")


if __name__ == "__main__":
    main()
