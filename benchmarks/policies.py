"""``python -m benchmarks.policies --model DIR``: the time line of both scheduling policies.

One engine in this process continues some answers, and long prompts come while it does: the same ones, and after the same
tokens of the first answer, with ``chunked-prefill`` and with ``prefill-first``, in turns for some rounds. Writes
``results/policies_<model>.json``, and a picture of one round of each if matplotlib is installed (the extra ``benchmarks``).
Only ratios are claims.

"""

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.facts import RESULTS, command_line, write_result
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.core import EngineCore
from engine.settings import EngineSettings

POLICIES = ("chunked-prefill", "prefill-first")


@dataclass(frozen=True)
class Load:
    """Answers that run, and prompts that come. arrivals: tokens of the first answer after which each prompt comes."""

    vocab_size: int
    num_answers: int = 3
    answer_tokens: int = 64
    prompt_tokens: int = 768
    tokens_after_prompt: int = 8
    chunk_tokens: int = 64
    arrivals: tuple[int, ...] = (12, 14, 40)


class Round:
    """One round on a new engine. times: of each token, by request, in seconds. arrived: when each prompt came."""

    def __init__(self, settings: EngineSettings, load: Load, seed: int) -> None:
        self.times: dict[str, list[float]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.arrived: dict[str, float] = {}
        self._load = load
        self._rng = Random(seed)
        core = EngineCore(settings)
        try:
            self._run(core)
        finally:
            core.close()

    def figures(self) -> dict[str, Any]:
        """Return the times on a clock that starts with the first prompt."""
        start = min(self.arrived.values())
        return {
            "arrived": {name: at - start for name, at in self.arrived.items()},
            "times": {name: [at - start for at in times] for name, times in self.times.items()},
        }

    def _run(self, core: EngineCore) -> None:
        load = self._load
        for number in range(load.num_answers):
            self._add(core, f"answer {number}", 32, load.answer_tokens)
        coming = list(load.arrivals)
        while core.scheduler.has_unfinished_requests() or coming:
            if coming and len(self.times.get("answer 0", ())) >= coming[0]:
                coming.pop(0)
                name = f"prompt {len(self.arrived)}"
                self._add(core, name, load.prompt_tokens, load.tokens_after_prompt)
                self.arrived[name] = time.monotonic()
            outputs = core.step()
            now = time.monotonic()
            for output in (one for of_client in outputs.values() for one in of_client):
                self.times.setdefault(output.request_id, []).extend([now] * len(output.token_ids))
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)

    def _add(self, core: EngineCore, name: str, num_prompt: int, num_tokens: int) -> None:
        prompt = [self._rng.randrange(self._load.vocab_size) for _ in range(num_prompt)]
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        core.add_request(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))


def measure(settings: EngineSettings, load: Load, num_rounds: int) -> dict[str, Any]:
    """Return the figures of each policy: medians over the rounds, and the times of the round whose gap is the median."""
    rounds: dict[str, list[Round]] = {policy: [] for policy in POLICIES}
    for number in range(num_rounds):
        for policy in POLICIES:
            changes = {
                "scheduling_policy": policy,
                "max_num_batched_tokens": max(load.prompt_tokens, settings.max_num_batched_tokens),
                "max_num_mixed_tokens": load.chunk_tokens,
            }
            rounds[policy].append(Round(settings.model_copy(update=changes), load, number))
    pairs = zip(*rounds.values(), strict=True)
    return {
        "load": asdict(load),
        "num_rounds": num_rounds,
        "num_threads": settings.num_threads,
        "equal_tokens": all(one.tokens == other.tokens for one, other in pairs),
        "policies": {policy: _summary([one.figures() for one in own]) for policy, own in rounds.items()},
    }


def longest_gap(figures: Mapping[str, Any]) -> float:
    """Return the longest time between two tokens of one running answer, in seconds."""
    return max(later - earlier for earlier, later in _gaps(figures))


def _summary(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    firsts = [one["times"][name][0] - arrived for one in rounds for name, arrived in one["arrived"].items()]
    gaps = [later - earlier for one in rounds for earlier, later in _gaps(one)]
    in_order = sorted(rounds, key=longest_gap)
    return {
        "longest_gap": median(map(longest_gap, rounds)),
        "median_gap": median(gaps),
        "ttft": median(firsts),
        "shown": in_order[len(in_order) // 2],
    }


def _gaps(figures: Mapping[str, Any]) -> list[tuple[float, float]]:
    return [
        pair
        for name, times in figures["times"].items()
        if name not in figures["arrived"]
        for pair in pairwise(times)
    ]


def table(figures: Mapping[str, Any]) -> str:
    """Return the figures as Markdown, in milliseconds."""
    load = figures["load"]
    lines = [
        "| policy | longest gap of a running answer, ms | median gap, ms | TTFT of the prompts, ms |",
        "| -- | -: | -: | -: |",
    ]
    for policy, found in figures["policies"].items():
        cells = (f"{1000 * found[name]:.0f}" for name in ("longest_gap", "median_gap", "ttft"))
        lines.append(f"| `{policy}` | {' | '.join(cells)} |")
    chunked, whole = (figures["policies"][policy] for policy in POLICIES)
    return (
        f"{load['num_answers']} answers, {len(load['arrivals'])} prompts of {load['prompt_tokens']} tokens, chunks of"
        f" {load['chunk_tokens']} beside answers, {figures['num_threads']} threads; medians of"
        f" {figures['num_rounds']} rounds.\n\n" + "\n".join(lines) + "\n\n"
        f"prefill-first over chunked-prefill: longest gap {whole['longest_gap'] / chunked['longest_gap']:.1f}, TTFT"
        f" {whole['ttft'] / chunked['ttft']:.2f}. The tokens are {'' if figures['equal_tokens'] else 'not '}the same."
    )


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """Draw the round of each policy whose longest gap is the median. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 1, figsize=(10, 6), sharex=True, layout="constrained")
    for axis, policy in zip(axes, POLICIES, strict=True):
        shown = figures["policies"][policy]["shown"]
        names = sorted(shown["times"], reverse=True)
        for row, name in enumerate(names):
            times = shown["times"][name]
            colour = "tab:orange" if name in shown["arrived"] else "tab:blue"
            axis.plot(times, [row] * len(times), "|", color=colour, markersize=12)
            if name in shown["arrived"]:
                axis.barh(
                    row,
                    times[0] - shown["arrived"][name],
                    left=shown["arrived"][name],
                    height=0.5,
                    color="0.8",
                )
        axis.set(title=policy, yticks=range(len(names)), yticklabels=names, ylim=(-0.6, len(names) - 0.4))
    axes[-1].set(
        xlabel="seconds since the first prompt came; a line is a token, grey is the time to the first one"
    )
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Measure, write the figures and the picture, print the table."""
    given = _arguments()
    config = json.loads((given.model / "config.json").read_text())
    settings = EngineSettings(
        model=given.model, dtype="bfloat16", num_threads=given.threads, kv_cache_bytes=2**28
    )
    found = measure(settings, Load(config["vocab_size"], prompt_tokens=given.prompt_tokens), given.rounds)
    figures = {"command": command_line("benchmarks.policies"), **found}
    path = write_result(f"policies_{given.model.name}", figures, given.results)
    sys.stdout.write(f"{table(figures)}\n{path}\n")
    if importlib.util.find_spec("matplotlib") is None:
        sys.stderr.write("there is no picture: pip install 'kvbaton[benchmarks]'\n")
        return
    draw(figures, path.with_suffix(".png"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of a checkpoint")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each policy")
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine")
    parser.add_argument("--prompt-tokens", type=int, default=768, help="length of the prompts that come")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of the figures and of the picture"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
