"""``python -m benchmarks.service_speed --model DIR``: the cost of the service compared with the engine alone.

Throughput: 32 concurrent streams over HTTP through the router and one aggregated worker, over the tokens per second of the
engine in one process with the same sizes; both are loaded at the same time and take turns, and the engine is stopped while
the service is measured. Time to first token: a client's wait minus the worker's computation of the prompt by its own clock
(``timings``), one request at a time; and, in turns, the same for a client that calls such a worker directly. The difference
is the router's share: HTTP, checks, routing, and the way to the client. Writes ``results/service_speed_<model>.json``; only
ratios and differences are claims.

"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from benchmarks.direct_worker import DirectWorker, direct_worker
from benchmarks.engine import OURS
from benchmarks.facts import RESULTS, command_line, write_result
from benchmarks.gaps import percentile
from benchmarks.others import Use, end_on_sigterm, watch_use
from benchmarks.peers.work import Load, Prompts
from benchmarks.runners import Order, Program, Runner, random_prompts
from benchmarks.samples import sample, summary
from benchmarks.servers import Server, Start, kvbaton_server
from benchmarks.streams import Stream, stream

StartDirect = Callable[[Path], AbstractAsyncContextManager[DirectWorker]]
"""Maps a folder for logs to a worker without a router."""


@dataclass(frozen=True)
class Plan:
    """The plan of a run. num_single: sequential requests. time_limit: seconds for each start and each round."""

    model: Path
    vocab_size: int
    num_threads: int
    rounds: int = 5
    max_repeats: int = 3
    at_once: int = 32
    prompt: int = 128
    answer: int = 128
    num_single: int = 60
    time_limit: float = 240.0


def main() -> None:
    """Measure, write the figures, print them."""
    end_on_sigterm()
    given = _arguments()
    config = json.loads((given.model / "config.json").read_text())
    plan = Plan(
        model=given.model.absolute(),
        vocab_size=config["vocab_size"],
        num_threads=given.threads,
        rounds=given.rounds,
        max_repeats=given.max_repeats,
        num_single=given.num_single,
    )
    with tempfile.TemporaryDirectory(prefix="kvbaton-service-speed-") as folder:
        starts = partial(_service, plan), partial(_direct, plan)
        found = asyncio.run(measure_service(plan, OURS, *starts, Path(folder)))
    command = command_line("benchmarks.service_speed")
    figures = {"command": command, "model": given.model.name, **found}
    path = write_result(f"service_speed_{given.model.name}", figures, given.results)
    sys.stdout.write(f"{table(figures)}\n{path}\n")


async def measure_service(
    plan: Plan, program: Program, start: Start, start_direct: StartDirect, folder: Path
) -> dict[str, Any]:
    """Measure throughput in turns, then sequential first tokens. Raises RunnerError, ServerError, StreamError.

    program: the engine alone. start: the service. start_direct: such a worker without a router.
    """
    cores = tuple(sorted(os.sched_getaffinity(0)))[-plan.num_threads :]
    load = Load(str(plan.model), len(cores), 2048, plan.at_once, str(folder))
    rng = random.Random()
    offline = list[dict[str, Any]]()
    served = list[dict[str, Any]]()
    async with (
        start(folder) as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        asked = _Asked(plan, rng, server, session)
        with closing(Runner(program, load, folder / "engine.log", cores, plan.time_limit)) as runner:
            await asked.over_service()  # both warm up
            await asked.offline(runner)
            for _ in range(plan.rounds):
                offline += await _quiet(partial(asked.offline, runner), plan.max_repeats)
                served += await _quiet(asked.over_service, plan.max_repeats)
        async with start_direct(folder) as worker:
            waits = [await asked.waits_for_first_token(worker) for _ in range(plan.num_single + 1)][1:]
    alone = summary(offline)
    through = summary(served)
    over_http, direct = ([1000 * each[way] for each in waits] for way in (0, 1))
    return {
        "plan": {**asdict(plan), "model": plan.model.name},
        "offline": alone,
        "service": through,
        "service_over_offline": through["median"] / alone["median"],
        "wait_for_first_token_ms": {"service": _spread(over_http), "worker": _spread(direct)},
        "router_adds_to_ttft_ms": median(over_http) - median(direct),
    }


def _service(plan: Plan, folder: Path) -> AbstractAsyncContextManager[Server]:
    arguments = ("--both", "1", "--num-threads", str(plan.num_threads), "--dtype", "bfloat16")
    return kvbaton_server(folder, plan.model, *arguments, time_limit=plan.time_limit)


def _direct(plan: Plan, folder: Path) -> AbstractAsyncContextManager[DirectWorker]:
    arguments = ("--num-threads", str(plan.num_threads), "--dtype", "bfloat16")
    return direct_worker(folder, plan.model, *arguments, time_limit=plan.time_limit)


def _spread(milliseconds: list[float]) -> dict[str, Any]:
    return {
        "p50": percentile(milliseconds, 0.5),
        "p99": percentile(milliseconds, 0.99),
        "samples": milliseconds,
    }


class _Asked:
    """Sends new prompts to the engine or to the service."""

    def __init__(
        self, plan: Plan, rng: random.Random, server: Server, session: aiohttp.ClientSession
    ) -> None:
        self._plan = plan
        self._rng = rng
        self._server = server
        self._session = session

    async def offline(self, runner: Runner) -> dict[str, Any]:
        """Measure tokens per second of the engine."""
        with runner.turn(), watch_use() as use:
            seconds = float(
                runner.run(Order([self._prompts(self._plan.at_once)], self._plan.answer))["seconds"]
            )
        return self._sample(seconds, use)

    async def over_service(self) -> dict[str, Any]:
        """Measure tokens per second through router and worker, until the last stream has ended."""
        prompts = self._prompts(self._plan.at_once)
        with watch_use() as use:
            begin = time.perf_counter()
            async with asyncio.timeout(self._plan.time_limit), asyncio.TaskGroup() as tasks:
                for prompt in prompts:
                    tasks.create_task(self._stream(prompt, self._plan.answer))
            seconds = time.perf_counter() - begin
        return self._sample(seconds, use)

    async def waits_for_first_token(self, worker: DirectWorker) -> tuple[float, float]:
        """Return the seconds beyond the worker's time for the prompt: over HTTP, and without a router."""
        over_http, direct = self._prompts(2)
        async with asyncio.timeout(self._plan.time_limit):
            answer = await self._stream(over_http, 2)
            wait = await worker.waits_for_first_token(direct)
        assert answer.timings is not None
        return answer.ttft - float(answer.timings["prefill"]), wait

    async def _stream(self, prompt: list[int], num_tokens: int) -> Stream:
        server = self._server
        return await stream(self._session, server.url, server.model, prompt, num_tokens, with_timings=True)

    def _prompts(self, count: int) -> Prompts:
        return random_prompts(self._rng, count, self._plan.prompt, self._plan.vocab_size)

    def _sample(self, seconds: float, use: Use) -> dict[str, Any]:
        return sample(self._plan.at_once * self._plan.answer / seconds, use)


async def _quiet(take: Callable[[], Awaitable[dict[str, Any]]], max_repeats: int) -> list[dict[str, Any]]:
    """Take samples until one is undisturbed, at most ``max_repeats`` more."""
    samples = [await take()]
    while not samples[-1]["is_quiet"] and len(samples) <= max_repeats:
        samples.append(await take())
    return samples


def table(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    plan = figures["plan"]
    waits = figures["wait_for_first_token_ms"]
    rows = [
        ("engine alone, tokens/s", f"{figures['offline']['median']:.0f}{_noise(figures['offline'])}"),
        ("through the service, tokens/s", f"{figures['service']['median']:.0f}{_noise(figures['service'])}"),
        ("service over engine", f"{figures['service_over_offline']:.0%}"),
        *(
            (f"first token, less the worker's time on the prompt, {name}", f"{waits[way]['p50']:.2f} ms")
            for name, way in (("over HTTP", "service"), ("without a router", "worker"))
        ),
        ("the router adds, p50", f"{figures['router_adds_to_ttft_ms']:.2f} ms"),
    ]
    head = f"| {plan['at_once']} at once, {plan['prompt']} + {plan['answer']} tokens | |\n| --- | --- |\n"
    return head + "\n".join(f"| {name} | {value} |" for name, value in rows)


def _noise(found: dict[str, Any]) -> str:
    return "" if found["is_quiet"] else " (noisy)"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of a checkpoint")
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of the worker, and of the engine alone"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-repeats", type=int, default=3, help="repetitions of a disturbed sample")
    parser.add_argument(
        "--num-single", type=int, default=60, help="sequential requests for the time to first token"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
