"""``python -m benchmarks.engine --model DIR --peers vllm,openvino,llama,transformers``: compares engines.

All engines are measured in one run: each has its own process (``benchmarks/peers``), they take turns, and waiting ones are
stopped. The machine's limits are measured in every round, and memory bandwidth before and after every sample. A sample is
repeated if other processes used more than 0.1 cores, or if the bandwidth changed by more than 15 %. Engines are compared by
the rounds in which both had about the same limit. Greedy answers are compared with those of ``transformers``, token by
token. Writes ``results/engine_<model>.json``; only ratios are claims.

"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ceilings import Ceilings, Machine, Weights
from benchmarks.facts import RESULTS, command_line, write_result
from benchmarks.onednn import PackedLinears
from benchmarks.others import end_on_sigterm
from benchmarks.peers.work import Load
from benchmarks.rows import ROWS, Row, Scene, Sizes, compared, quiet_sample, share_equal
from benchmarks.runners import Order, Program, Runner, RunnerError, random_prompts
from benchmarks.samples import summary

OURS = Program("kvbaton", "benchmarks.peers.kvbaton_engine")
REFERENCE = "transformers"
PEERS = {
    "vllm": "benchmarks.peers.vllm_cpu",
    "openvino": "benchmarks.peers.openvino_genai",
    "llama": "benchmarks.peers.llama_cpp",
    REFERENCE: "benchmarks.peers.transformers_generate",
}
_MAX_MODEL_LEN = 2048
_MAX_NUM_SEQS = 64
_EQUAL_PROMPTS = 8
_EQUAL_PROMPT_TOKENS = 32
_EQUAL_TOKENS = 32


@dataclass(frozen=True)
class Plan:
    """The plan of a run. time_limit: seconds per order. max_repeats: repetitions of a disturbed sample."""

    model: Path
    programs: tuple[Program, ...]
    sizes: Sizes
    rounds: int = 5
    max_repeats: int = 3
    rows: tuple[Row, ...] = ROWS
    time_limit: float = 300.0
    artefacts: Path = field(default_factory=lambda: Path(tempfile.gettempdir()) / "kvbaton-benchmarks")
    probe_bytes: int = 2**30


def main() -> None:
    """Measure with every number of threads, write the figures, print the tables."""
    end_on_sigterm()
    given = _arguments()
    config = json.loads((given.model / "config.json").read_text())
    pythons = {name: getattr(given, f"{name}_python") or sys.executable for name in PEERS}
    wanted = [name for name in given.peers.split(",") if name]
    plan = Plan(
        model=given.model,
        programs=(OURS, *(Program(name, PEERS[name], pythons[name]) for name in wanted)),
        sizes=Sizes(vocab_size=config["vocab_size"]),
        rounds=given.rounds,
        max_repeats=given.max_repeats,
        rows=tuple(row for row in ROWS if given.only in row.name),
        time_limit=given.time_limit,
    )
    figures = {
        "command": command_line("benchmarks.engine"),
        "model": plan.model.name,
        "threads": {number: measure_engines(plan, int(number)) for number in given.threads.split(",")},
    }
    path = write_result(f"engine_{plan.model.name}", figures, given.results)
    sys.stdout.write(f"{table(figures)}\n{path}\n")


def measure_engines(plan: Plan, num_threads: int) -> dict[str, Any]:
    """Measure all rows with this number of threads. A failed peer is omitted and listed; our engine raises RunnerError."""
    weights = Weights.of(plan.model)
    seed = random.SystemRandom().getrandbits(32)
    failed: dict[str, str] = {}
    linears = PackedLinears(weights.linears)
    with ExitStack() as stack:
        runners = _started(plan, num_threads, stack, failed)
        answers = _greedy_answers(runners, plan.sizes, random.Random(seed), failed)
        samples: dict[str, dict[str, list[dict[str, Any]]]] = {row.name: {} for row in plan.rows}
        packed: dict[str, list[dict[str, Any]]] = {row.name: [] for row in plan.rows if row.batch}
        ceilings: list[Ceilings] = []
        scene = Scene(Machine(num_threads, plan.probe_bytes), weights)
        for number in range(plan.rounds):
            ceilings.append(scene.begin_round())
            for row in plan.rows:
                if row.batch:
                    packed[row.name].append(linears.sample(row.batch, num_threads))
                turns = runners[number % len(runners) :] + runners[: number % len(runners)]
                for runner in turns:
                    rng = random.Random(f"{seed}:{number}:{row.name}")
                    _take_turn(plan, row, runner, rng, samples, failed, scene)
        engines = {runner.name: _about(runner, answers) for runner in runners}
    return {
        "seed": seed,
        "ceilings": [asdict(one) for one in ceilings],
        "weights": {"num_bytes": weights.num_bytes, "num_multiplied": weights.num_multiplied},
        "packed_linears_of_onednn": {name: summary(taken) for name, taken in packed.items()},
        "engines": engines,
        "left_out": failed,
        "rows": {row.name: compared(row, samples[row.name], OURS.name) for row in plan.rows},
    }


def table(figures: Mapping[str, Any]) -> str:
    """Return the figures of ``main`` as Markdown: one table per number of threads."""
    return "\n\n".join(_threads_table(number, found) for number, found in figures["threads"].items())


def _threads_table(number: str, found: Mapping[str, Any]) -> str:
    names = list(found["engines"])
    head = [
        "threads: " + number,
        *names,
        "the machine's limit",
        "ours over the best peer",
        "share of the limit",
    ]
    lines = [head, ["---"] * len(head)]
    for name, row in found["rows"].items():
        medians = [_median(row["engines"].get(engine)) for engine in names]
        ratio_text = _ratio_text(row)
        share = row["share_of_limit"][OURS.name]
        lines.append([f"{name}, {row['unit']}", *medians, f"{row['limit']:.4g}", ratio_text, f"{share:.0%}"])
    engines = [found["engines"][name] for name in names]
    equal = [one["share_equal_to_transformers"] for one in engines]
    rest = [""] * 3
    lines.append(["equal greedy tokens", *("–" if one is None else f"{one:.0%}" for one in equal), *rest])
    lines.append(["start, s", *(f"{one['start_seconds']:.1f}" for one in engines), *rest])
    lines.append(["peak memory, GB", *(f"{one['peak_bytes'] / 1e9:.1f}" for one in engines), *rest])
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    for name, bound in found["packed_linears_of_onednn"].items():
        text += (
            f"\n\nThe linear layers alone, by oneDNN with packed weights, {name}: {_median(bound)} tokens/s."
        )
    return text + "".join(f"\n\n{name} is omitted: {why}" for name, why in found["left_out"].items())


def _ratio_text(row: Mapping[str, Any]) -> str:
    """Return our figure over the best peer's; marked if no round was comparable."""
    best = row["best_peer"]
    if best is None:
        return "–"
    return f"{row['over_best_peer']:.2f} ({best})" + ("" if row["over"][best]["is_fair"] else " (noisy)")


def _median(found: Mapping[str, Any] | None) -> str:
    """Return the median as text; marked if no sample was undisturbed."""
    return "–" if found is None else f"{found['median']:.4g}" + ("" if found["is_quiet"] else " (noisy)")


def _started(plan: Plan, num_threads: int, stack: ExitStack, failed: dict[str, str]) -> list[Runner]:
    cores = tuple(sorted(os.sched_getaffinity(0)))[-num_threads:]
    plan.artefacts.mkdir(exist_ok=True)
    load = Load(
        model=str(plan.model.absolute()),
        num_threads=num_threads,
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=_MAX_NUM_SEQS,
        artefact=str(plan.artefacts / plan.model.name),
    )
    runners = []
    for program in plan.programs:
        log = plan.artefacts / f"{program.name}.log"
        try:
            runner = Runner(program, load, log, cores, plan.time_limit)
            stack.callback(runner.close)
            _warm_up(runner, plan.sizes)
        except RunnerError as error:
            if program == OURS:
                raise
            failed[program.name] = str(error)
        else:
            runners.append(runner)
    return runners


def _warm_up(runner: Runner, sizes: Sizes) -> None:
    rng = random.Random(0)
    with runner.turn():
        for count, length in ((1, sizes.long_prompt), (8, sizes.prompt)):
            runner.run(Order([random_prompts(rng, count, length, sizes.vocab_size)], 2))


def _greedy_answers(
    runners: list[Runner], sizes: Sizes, rng: random.Random, failed: dict[str, str]
) -> dict[str, list[list[int]]]:
    prompts = random_prompts(rng, _EQUAL_PROMPTS, _EQUAL_PROMPT_TOKENS, sizes.vocab_size)
    order = Order([[prompt] for prompt in prompts], _EQUAL_TOKENS, wants_tokens=True)
    answers = {}
    for runner in list(runners):
        try:
            with runner.turn():
                answers[runner.name] = [batch[0] for batch in runner.run(order)["token_ids"]]
        except RunnerError as error:
            _leave_out(runner, error, failed)
            runners.remove(runner)
    return answers


def _take_turn(
    plan: Plan,
    row: Row,
    runner: Runner,
    rng: random.Random,
    samples: dict[str, dict[str, list[dict[str, Any]]]],
    failed: dict[str, str],
    scene: Scene,
) -> None:
    if runner.name in failed:
        return
    try:
        taken = quiet_sample(row, runner, plan.sizes, rng, plan.max_repeats, scene)
        samples[row.name].setdefault(runner.name, []).extend(taken)
    except RunnerError as error:
        _leave_out(runner, error, failed)


def _leave_out(runner: Runner, error: RunnerError, failed: dict[str, str]) -> None:
    if runner.name == OURS.name:
        raise error
    failed[runner.name] = str(error)


def _about(runner: Runner, answers: Mapping[str, list[list[int]]]) -> dict[str, Any]:
    reference = answers.get(REFERENCE)
    return {
        **runner.facts,
        "start_seconds": runner.start_seconds,
        "peak_bytes": runner.peak_bytes,
        "share_equal_to_transformers": None
        if reference is None
        else share_equal(answers[runner.name], reference),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of a checkpoint in bfloat16")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated; empty: none")
    for name in PEERS:
        parser.add_argument(f"--{name}-python", help=f"Python of the environment with {name}")
    parser.add_argument("--threads", default="2,1", help="comma-separated numbers of threads")
    parser.add_argument("--only", default="", help="measure only rows whose names contain these words")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-repeats", type=int, default=3, help="repetitions of a disturbed sample")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds per order to an engine")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
