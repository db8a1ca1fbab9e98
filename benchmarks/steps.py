"""``python -m benchmarks.steps --model DIR``: the share of a decode step outside the model.

One engine in this process with default settings decodes 1, 8 and 32 requests, in consecutive steps as in a service without
input; greedy, and for 32 also with sampling. It measures the time in which no kernel computes layers or logits, since the
next step waits for Python (sampling, inputs), the part of it in which kernels sample, and the total time of Python, most of
which overlaps with kernels. Writes ``results/steps_<model>.json``.

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

from msgspec.structs import replace

from benchmarks.facts import RESULTS, command_line, write_result
from benchmarks.others import watch_use
from benchmarks.samples import sample, summary
from contract.errors import SettingError
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.core import EngineCore
from engine.kernels.binding import Kernels
from engine.settings import EngineSettings

BEST = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=0.8, top_p=0.95)
CASES = {
    "1 at once": (1, BEST),
    "8 at once": (8, BEST),
    "32 at once": (32, BEST),
    "32 at once, temperature 0.8, top-p 0.95": (32, RANDOM),
}
"""By name: number of requests and their sampling parameters."""
_PARTS = ("step_ms", "still_ms", "drawing_ms", "python_ms")
_FIRST_STEPS = 4
_PROMPT = 128


class Watch:
    """Times of each step since the last call in milliseconds: (whole, model idle, sampling, Python).

    A step lasts from the launch of its layers to the next launch. The model is idle while neither layers nor logits are
    computed; kernels sample in a part of that. Python's time is that of the engine's thread without kernels, even while
    other threads compute.

    """

    def __init__(self) -> None:
        self._steps: list[tuple[float, float, float, float]] = []
        self._launched: tuple[float, float] | None = None
        self._still_since = self._still = self._inside = self._drawing = 0.0
        self._is_computing = False

    def take(self) -> list[tuple[float, float, float, float]]:
        """Return the times and reset; call it while no step runs."""
        steps = self._steps
        self._steps = []
        self._launched = None
        return steps

    def launch(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the call after which the model is computed."""

        @wraps(call)
        def watched(*arguments: Any) -> Any:
            now = time.perf_counter()
            used = time.thread_time()
            if self._launched is not None:
                began, used_before = self._launched
                still = self._still + now - self._still_since
                python = used - used_before - self._inside
                self._steps.append((1000 * (now - began), 1000 * still, 1000 * self._drawing, 1000 * python))
            self._launched = (now, used)
            self._is_computing = True
            self._still = self._inside = self._drawing = 0.0
            return call(*arguments)

        return watched

    def compute(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the call at whose end the model is idle; it may already be busy at its beginning."""

        @wraps(call)
        def watched(*arguments: Any) -> Any:
            begin = time.perf_counter()
            used = time.thread_time()
            if not self._is_computing:
                self._still += begin - self._still_since
            result = call(*arguments)
            self._inside += time.thread_time() - used
            self._still_since = time.perf_counter()
            self._is_computing = False
            return result

        return watched

    def draw(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the call in which tokens are sampled while the model is idle."""

        @wraps(call)
        def watched(*arguments: Any) -> Any:
            begin = time.perf_counter()
            used = time.thread_time()
            result = call(*arguments)
            self._inside += time.thread_time() - used
            self._drawing += time.perf_counter() - begin
            return result

        return watched


@contextmanager
def watching() -> Iterator[Watch]:
    """Time all kernels of this process within the block."""
    watch = Watch()
    watched = {"launch": watch.launch, "wait": watch.compute, "linear": watch.compute, "draw": watch.draw}
    calls = {name: getattr(Kernels, name) for name in watched}
    for name, call in calls.items():
        setattr(Kernels, name, watched[name](call))
    try:
        yield watch
    finally:
        for name, call in calls.items():
            setattr(Kernels, name, call)


def measure_steps(
    model: Path, num_threads: int, num_steps: int, rounds: int, vocab_size: int
) -> dict[str, Any]:
    """Measure each case: milliseconds of a step, and of its part outside the model; samples are the medians of rounds."""
    settings = EngineSettings(model=model, dtype="bfloat16", num_threads=num_threads)
    rng = random.Random(1)
    found = dict[str, Any]()
    with watching() as watch:
        core = EngineCore(settings)
        try:
            for case, (size, drawing) in CASES.items():
                asked = replace(drawing, max_tokens=num_steps + _FIRST_STEPS, ignore_eos=True)
                taken = [_round(core, watch, size, asked, vocab_size, rng) for _ in range(rounds)]
                one = {name: summary([figures[name] for figures in taken]) for name in _PARTS}
                step, still, _, python = (one[name]["median"] for name in _PARTS)
                shares = {"share_still": still / step, "share_python": python / step}
                found[case] = one | shares | {"share_of_all_threads": python / step / num_threads}
        finally:
            core.close()
    return found


def _round(
    core: EngineCore, watch: Watch, size: int, sampling: SamplingParams, vocab_size: int, rng: random.Random
) -> dict[str, dict[str, Any]]:
    for number in range(size):
        prompt = [rng.randrange(vocab_size) for _ in range(_PROMPT)]
        core.add_request(EngineRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
    watch.take()
    with watch_use() as use:
        while core.needs_step():
            core.step(may_start_early=lambda: True)
    decodes = watch.take()[_FIRST_STEPS:-2]  # without prompts and the step that only ends requests
    if not decodes:
        raise SettingError("the kernels do not support this model here", param="model")
    parts = zip(_PARTS, zip(*decodes, strict=True), strict=True)
    return {name: sample(statistics.median(values), use) for name, values in parts}


def table(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    threads = figures["num_threads"]
    head = (
        f"| threads: {threads} | a step, ms | the model is idle, ms | share | of it sampling, ms"
        " | Python, ms | of the step | of all threads' time |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
    )
    rows = [
        f"| {case} | {one['step_ms']['median']:.2f} | {one['still_ms']['median']:.2f} | {one['share_still']:.1%}"
        f" | {one['drawing_ms']['median']:.2f} | {one['python_ms']['median']:.2f} | {one['share_python']:.1%}"
        f" | {one['share_of_all_threads']:.1%} |"
        for case, one in figures["cases"].items()
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
    cases = measure_steps(given.model, given.threads, given.steps, given.rounds, vocab_size)
    figures = {
        "command": command_line("benchmarks.steps"),
        "model": given.model.name,
        "num_threads": given.threads,
        "cases": cases,
    }
    path = write_result(f"steps_{given.model.name}", figures, given.results)
    sys.stdout.write(f"{table(figures)}\n{path}\n")


if __name__ == "__main__":
    main()
