"""``python -m benchmarks.drafts``: tokens a second with and without guessed tokens (``--speculate ngram``).

Two engines in this process with default settings, one of which speculates, take turns; both computed the same prompts. The
model has random layers of 125 million parameters, and answers with known texts (``tests.copying_checkpoint``):

- copying: the prompt is a passage and its first token again; the answer repeats the passage. Sampled, one token in 20 is
  left out.
- ordinary: a walk through 512 tokens with 4 successors each. Some pairs of tokens have occurred before, and every fourth of
  them was followed by the token that follows now.

A figure is tokens a second of all answers from the first step that computes no prompt. Others may disturb it, so tokens for
a second of both threads' processor time are compared as well, prompts included. The answers of both engines are compared,
token by token. Writes ``results/drafts_m125.json``.

"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.facts import RESULTS, command_line, write_result
from benchmarks.others import watch_use
from benchmarks.samples import median_of, sample, summary
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.core import EngineCore
from engine.settings import EngineSettings
from tests.copying_checkpoint import make_copying_checkpoint

_VOCABULARY = 32_000
# Tokens 512 and up are passages: each is followed by the next one, or by the one behind that. The others are ordinary.
_ORDINARY = 512
_PASSAGE = 160
_TOKENS = 128
_SIZES = (1, 8, 32)
_SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.0, max_tokens=_TOKENS, ignore_eos=True),
}
Prompts = list[list[int]]


@dataclass
class Engine:
    """One of the two engines."""

    name: str
    core: EngineCore

    def run(self, prompts: Prompts, sampling: SamplingParams, names: Iterator[int]) -> tuple[float, Prompts]:
        """Answer all prompts; return tokens a second without the steps that compute prompts, and the answers."""
        answers: dict[str, list[int]] = {}
        for index, prompt in enumerate(prompts):
            name = str(next(names))
            answers[name] = []
            own = SamplingParams(
                temperature=sampling.temperature,
                max_tokens=sampling.max_tokens,
                ignore_eos=True,
                seed=index,
            )
            self.core.add_request(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=own))
        began = time.perf_counter()
        num_before = 0
        while self.core.needs_step():
            for output in self.core.step(may_start_early=lambda: True).get(0, []):
                answers[output.request_id] += output.token_ids
            if not all(answers.values()):
                began = time.perf_counter()
                num_before = sum(map(len, answers.values()))
        num_tokens = sum(map(len, answers.values())) - num_before
        return num_tokens / (time.perf_counter() - began), list(answers.values())


def main() -> None:
    """Measure, write the figures, print a table."""
    given = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        successors, weights = _graph()
        model = make_copying_checkpoint(
            Path(folder),
            successors,
            weights,
            dtype=torch.bfloat16,
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=12,
            num_attention_heads=12,
            num_key_value_heads=4,
            head_dim=64,
            max_position_embeddings=1024,
        )
        engines = [
            Engine(name, EngineCore(EngineSettings(model=model, num_threads=given.threads, speculate=name)))
            for name in ("none", "ngram")
        ]
        try:
            figures = measure(engines, given.rounds, given.sizes)
        finally:
            for engine in engines:
                engine.core.shutdown()
    path = write_result(
        "drafts_m125", {"command": command_line("benchmarks.drafts"), **figures}, given.results
    )
    sys.stdout.write(f"{table(figures)}\n{path}\n")


def measure(engines: Sequence[Engine], num_rounds: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Return the samples of all rows. Raises SystemExit if an answer differs between the engines."""
    names = count()
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for number in range(num_rounds + 1):
        for text in ("copying", "ordinary"):
            for kind, sampling in _SAMPLING.items():
                for size in sizes:
                    rng = random.Random(f"{number}:{text}:{kind}:{size}")
                    prompts = [_prompt(text, rng) for _ in range(size)]
                    found: Prompts | None = None
                    # The first round warms up caches, kernels and what the engine has measured.
                    for engine in engines if number % 2 else engines[::-1]:
                        with watch_use() as use:
                            speed, answers = engine.run(prompts, sampling, names)
                        if found is not None and answers != found:
                            raise SystemExit(f"answers differ: {text}, {kind}, {size}")
                        found = answers
                        if number:
                            of_row = rows.setdefault(f"{text}, {kind}, {size} at once", {})
                            per_cpu = sum(map(len, answers)) / use.own_cpu_seconds
                            of_row.setdefault(engine.name, []).append(
                                {**sample(speed, use), "tokens_per_cpu_second": per_cpu}
                            )
    stats = engines[1].core.scheduler.make_stats().spec_decoding_stats
    assert stats is not None, "the second engine speculates"
    accepted = {
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "num_accepted_tokens_per_pos": stats.num_accepted_tokens_per_pos,
    }
    return {"rows": {name: _compared(row) for name, row in rows.items()}, "accepted": accepted}


def table(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    lines = [
        "| | tokens/s without | with guesses | ratio | ratio by processor time |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in figures["rows"].items():
        speeds = f"{row['none']['median']:.4g} | {row['ngram']['median']:.4g}"
        ratios = f"{row['ratio']:.2f} | {row['cpu_ratio']:.2f}"
        lines.append(f"| {name} | {speeds} | {ratios} |")
    return "\n".join(lines)


def _compared(row: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    # By round: what disturbs one turn often disturbs the next one as well.
    pairs = zip(row["none"], row["ngram"], strict=True)
    ratios = [
        {
            "value": after["value"] / before["value"],
            "cpu": after["tokens_per_cpu_second"] / before["tokens_per_cpu_second"],
            "is_quiet": before["is_quiet"] and after["is_quiet"],
        }
        for before, after in pairs
    ]
    return {
        **{name: summary(samples) for name, samples in row.items()},
        "ratio": median_of(ratios, "value"),
        "cpu_ratio": median_of(ratios, "cpu"),
    }


@cache
def _graph() -> tuple[list[list[int]], list[list[float]]]:
    """Return the successors of each token, and their logits as parts of the best one's."""
    rng = random.Random(3)
    orders = [rng.sample(range(_ORDINARY), _ORDINARY) for _ in range(4)]
    successors = [[0] * 4 for _ in range(_ORDINARY)]
    for order in orders:  # four circles through all ordinary tokens
        for token, following in zip(order, order[1:] + order[:1], strict=True):
            successors[token][orders.index(order)] = following
    weights = [[1.0, 0.995, 0.99, 0.985]] * _ORDINARY
    rest = _VOCABULARY - _ORDINARY
    for place in range(rest):
        successors.append([_ORDINARY + (place + step) % rest for step in (1, 2)])
        weights.append([1.0, 0.88])
    return successors, weights


def _prompt(text: str, rng: random.Random) -> list[int]:
    if text == "copying":
        first = rng.randrange(_ORDINARY, _VOCABULARY - _PASSAGE)
        return [*range(first, first + _PASSAGE), first]
    successors, _ = _graph()
    token = rng.randrange(_ORDINARY)
    walk = [token]
    for _ in range(_PASSAGE):
        token = rng.choice(successors[token])
        walk.append(token)
    return walk


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--sizes", type=lambda text: [int(size) for size in text.split(",")], default=list(_SIZES)
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
