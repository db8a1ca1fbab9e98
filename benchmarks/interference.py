"""``python -m benchmarks.interference --model DIR --vllm-python PYTHON``: the effect of prompts on running answers.

Four closed-loop chats, and long prompts at a fixed rate: none, one every five seconds, and a sweep up to 60 % of one core's
prefill capacity, which is measured first. Three servers get the same load one after the other: one prefill and one decode
worker with a core each; one aggregated worker with two threads and the best chunk size of a small search; and vLLM's server.
At the rate of comparison they then take turns for some rounds, since the machine's own stalls vary: the ratios are medians
over the rounds. Writes ``results/interference_<model>.json``, and a picture of the goodput over (TTFT, TPOT) goals if
matplotlib is installed (the extra ``benchmarks``). Only ratios are claims.

"""

import argparse
import asyncio
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.facts import RESULTS, command_line, versions_in, write_result
from benchmarks.goodput import all_maps, draw
from benchmarks.load import Load, Outcome, quiet_run, seconds_alone
from benchmarks.others import end_on_sigterm
from benchmarks.samples import MAX_OTHER_CORES
from benchmarks.servers import Server, Start, kvbaton_server, vllm_server

OURS = "prefill 1, decode 1"
AGGREGATED = "both 1"
VLLM = "vLLM"
_PROMPTS_ALONE = 5


@dataclass(frozen=True)
class Plan:
    """The plan of a run. load: at the rate of comparison. shares: rates of the sweep as shares of one core's prefill.

    rounds: rounds after the sweep, whose run at that rate is the first.
    """

    load: Load
    shares: tuple[float, ...]
    chunks: tuple[int, ...]
    search_seconds: float
    max_repeats: int
    rounds: int = 0


def main() -> None:
    """Measure, write the figures and the picture, print the table."""
    end_on_sigterm()
    given = _arguments()
    config = json.loads((given.model / "config.json").read_text())
    plan = Plan(
        load=Load(vocab_size=config["vocab_size"], rate=given.rate, seconds=given.seconds),
        shares=tuple(float(share) for share in given.shares.split(",") if share),
        chunks=tuple(int(chunk) for chunk in given.chunks.split(",")),
        search_seconds=given.search_seconds,
        max_repeats=given.max_repeats,
        rounds=given.rounds,
    )
    starts = _starts(given)
    peers = {VLLM: versions_in(given.vllm_python, "vllm", "torch")} if given.vllm_python else {}
    can_draw = importlib.util.find_spec("matplotlib") is not None
    if not can_draw:
        sys.stderr.write("there will be no picture: pip install 'kvbaton[benchmarks]'\n")
    with tempfile.TemporaryDirectory(prefix="kvbaton-interference-") as folder:
        found, runs = asyncio.run(measure_interference(plan, starts, Path(folder)))
    name = f"interference_{given.model.name}"
    facts = {"command": command_line("benchmarks.interference"), "model": given.model.name, "peers": peers}
    path = write_result(name, {**facts, **found}, given.results)
    sys.stdout.write(f"{table(found)}\n{path}\n")
    if can_draw:
        picture = given.results / f"goodput_{given.model.name}.png"
        draw(*all_maps(runs), OURS, picture)
        sys.stdout.write(f"{picture}\n")


async def measure_interference(
    plan: Plan, starts: dict[str, Callable[..., Start]], folder: Path
) -> tuple[dict[str, Any], dict[str, list[Outcome]]]:
    """Return the figures, and the outcomes of each configuration by rate. ``starts[AGGREGATED]`` takes a chunk size."""
    async with starts[OURS]()(folder) as server:
        alone = await seconds_alone(server, plan.load, _PROMPTS_ALONE)
        capacity = 1 / sorted(alone)[len(alone) // 2]
        rates = sorted({0.0, plan.load.rate, *(share * capacity for share in plan.shares)})
        runs = {OURS: await _sweep(server, plan, rates)}
    short = replace(plan.load, seconds=plan.search_seconds)
    search = {chunk: await _once(starts[AGGREGATED](chunk), short, 0, folder) for chunk in plan.chunks}
    best = min(search, key=lambda chunk: float(search[chunk]["chats"]["itl_p999"]))
    servers = {name: start(best) if name == AGGREGATED else start() for name, start in starts.items()}
    for name, start in servers.items():
        if name == OURS:
            continue
        async with start(folder) as server:
            await seconds_alone(server, plan.load, 1)
            runs[name] = await _sweep(server, plan, rates)
    compared_at = rates.index(plan.load.rate)
    rounds = [{name: outcomes[compared_at].figures for name, outcomes in runs.items()}]
    for _ in range(plan.rounds):
        turns = {name: _once(start, plan.load, plan.max_repeats, folder) for name, start in servers.items()}
        rounds.append({name: await turn for name, turn in turns.items()})
    figures = {
        "one_core_prompts_per_second": capacity,
        "seconds_alone": alone,
        "compared_at": plan.load.rate,
        "chunk_search": {"best": best, "runs": search},
        "runs": {name: [one.figures for one in outcomes] for name, outcomes in runs.items()},
        "rounds": rounds,
    }
    return {**figures, "over": compared(figures)}, runs


async def _once(start: Start, load: Load, max_repeats: int, folder: Path) -> dict[str, Any]:
    async with start(folder) as server:
        await seconds_alone(server, load, 1)
        return (await quiet_run(server, load, max_repeats)).figures


async def _sweep(server: Server, plan: Plan, rates: Sequence[float]) -> list[Outcome]:
    return [await quiet_run(server, replace(plan.load, rate=rate), plan.max_repeats) for rate in rates]


def compared(figures: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return ours over each other configuration at the rate of comparison: the median of the rounds' ratios."""
    rounds: list[dict[str, Any]] = figures["rounds"]

    def over(other: str, part: str, name: str) -> float | None:
        pairs = [(each[OURS][part][name], each[other][part][name]) for each in rounds]
        ratios = [one / two for one, two in pairs if one and two]
        return median(ratios) if ratios else None

    return {
        name: {
            "itl_p999": over(name, "chats", "itl_p999"),
            "itl_p99": over(name, "chats", "itl_p99"),
            "worst_gap_per_chat_p50": over(name, "chats", "worst_gap_per_chat_p50"),
            "long_ttft_p50": over(name, "long_prompts", "ttft_p50"),
            "tokens_per_second": over(name, "chats", "tokens_per_second"),
        }
        for name in rounds[0]
        if name != OURS
    }


def table(figures: dict[str, Any]) -> str:
    """Return all runs as Markdown, in milliseconds."""
    head = [
        "configuration", "long prompts/s", "chat tokens/s", "ITL p50", "p99", "p99.9", "max",
        "worst gap per chat, p50", "gaps over 2x, 3x", "long TTFT p50", "client, router, server cores",
    ]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for name, runs in figures["runs"].items():
        lines += [[f"{name}{_noise(run)}", *_cells(run)] for run in runs]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    ratios = "\n".join(
        f"- {OURS} over {name}: "
        + ", ".join(f"{what} {_number(value, '.2f')}" for what, value in found.items())
        for name, found in figures["over"].items()
    )
    search = figures["chunk_search"]
    capacity = figures["one_core_prompts_per_second"]
    rounds = "\n".join(f"- {_rounds(figures['rounds'], name, 'itl_p999')}" for name in figures["runs"])
    return (
        f"{text}\n\nAt {figures['compared_at']:g} long prompts per second, p99.9 of the gaps in milliseconds, round by round"
        f" (the first one is the sweep's, above):\n\n{rounds}\n\nMedians of the rounds' ratios:\n\n{ratios}\n\n"
        f"One core prefills {capacity:.2f} long prompts per second. {AGGREGATED} runs with the chunk size of"
        f" the lowest p99.9, {search['best']} tokens. A short search at the compared rate:\n\n{_searched(search)}"
    )


def _searched(search: dict[str, Any]) -> str:
    return "\n".join(
        f"- {chunk} tokens: p99.9 {run['chats']['itl_p999']:.1f}, chat tokens/s {run['chats']['tokens_per_second']:.1f},"
        f" long TTFT p50 {_number(run['long_prompts']['ttft_p50'], '.0f')}"
        for chunk, run in search["runs"].items()
    )


def _rounds(rounds: list[dict[str, Any]], name: str, figure: str) -> str:
    return f"{name}: " + ", ".join(_number(each[name]["chats"][figure], ".1f") for each in rounds)


def _cells(run: dict[str, Any]) -> list[str]:
    chats = run["chats"]
    cores = run["cores"]
    names = ("tokens_per_second", "itl_p50", "itl_p99", "itl_p999", "itl_max", "worst_gap_per_chat_p50")
    return [
        f"{run['load']['rate']:.2f}",
        *(_number(chats[name], ".1f") for name in names),
        f"{chats['num_gaps_over_2x']}, {chats['num_gaps_over_3x']} of {chats['num_gaps']}",
        _number(run["long_prompts"]["ttft_p50"], ".0f"),
        ", ".join(_number(cores.get(name), ".2f") for name in ("client", "router", "server")),
    ]


def _noise(run: dict[str, Any]) -> str:
    return "" if run["other_cores"] <= MAX_OTHER_CORES else " (noisy)"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _starts(given: argparse.Namespace) -> dict[str, Callable[..., Start]]:
    limit = given.time_limit
    model = given.model.absolute()

    def kvbaton(*arguments: str) -> Start:
        def start(folder: Path) -> AbstractAsyncContextManager[Server]:
            return kvbaton_server(folder, model, "--dtype", "bfloat16", *arguments, time_limit=limit)

        return start

    def aggregated(chunk: int) -> Start:
        threads = ("--num-threads", str(given.threads))
        return kvbaton("--both", "1", *threads, "--max-num-batched-tokens", str(chunk))

    def vllm(folder: Path) -> AbstractAsyncContextManager[Server]:
        chunk = ("--max-num-batched-tokens", "128", "--max-num-seqs", "64")
        return vllm_server(folder, model, given.vllm_python, *chunk, time_limit=limit)

    starts: dict[str, Callable[..., Start]] = {
        OURS: partial(kvbaton, "--prefill", "1", "--decode", "1", "--num-threads", "1"),
        AGGREGATED: aggregated,
    }
    return starts | ({VLLM: lambda: vllm} if given.vllm_python else {})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of a checkpoint")
    parser.add_argument("--vllm-python", help="Python of the environment with vLLM; unset: without vLLM")
    parser.add_argument(
        "--rate", type=float, default=0.2, help="long prompts per second at which servers are compared"
    )
    parser.add_argument(
        "--shares", default="0.15,0.3,0.45,0.6", help="rates of the sweep as shares of one core's prefill"
    )
    parser.add_argument(
        "--chunks", default="64,128,256,512", help="chunk sizes to try with the aggregated worker"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of each load")
    parser.add_argument(
        "--rounds", type=int, default=4, help="rounds at the rate of comparison, after the sweep"
    )
    parser.add_argument(
        "--search-seconds", type=float, default=30.0, help="seconds of each load of the search"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of the aggregated worker")
    parser.add_argument("--max-repeats", type=int, default=2, help="repetitions of a disturbed load")
    parser.add_argument(
        "--time-limit", type=float, default=240.0, help="time limit in seconds for the start of a server"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of the figures and of the picture"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
