"""``python -m benchmarks.service_speed --model DIR``: what the service costs beside the engine alone.

Throughput: 32 streams at once over HTTP through router and one aggregated worker, over the tokens per second of the engine
in one process at the same sizes; both live at the same time and take turns, and the engine is stopped while the service is
measured. Time to first token: what a client waits, less what the worker's own clock says that it computed on that prompt
(``timings``), one request at a time; and beside it, in turns, what somebody waits who asks another such worker as a router
does. The difference is what the router adds: HTTP, checks, routing, and the way to the client.
To ``results/service_speed_<model>.json``; only ratios and differences are claims.
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
"""A folder for logs → a worker that is asked without a router."""


@dataclass(frozen=True)
class Plan:
    """What to run. num_single: requests one at a time. time_limit: seconds of each start and each round."""

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
    """Throughput in turns, then first tokens one at a time. Raises RunnerError, ServerError, StreamError.

    program: the engine alone. start: the service. start_direct: a worker of its kind, without a router.
    """
    cores = tuple(sorted(os.sched_getaffinity(0)))[-plan.num_threads :]
    load = Load(str(plan.model), len(cores), 2048, plan.at_once, str(folder))
    rng, offline, served = random.Random(), list[dict[str, Any]](), list[dict[str, Any]]()
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
    alone, through = summary(offline), summary(served)
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
    """The questions: fresh prompts each time, to the engine or to the service."""

    def __init__(
        self, plan: Plan, rng: random.Random, server: Server, session: aiohttp.ClientSession
    ) -> None:
        self._plan, self._rng = plan, rng
        self._server, self._session = server, session

    async def offline(self, runner: Runner) -> dict[str, Any]:
        """Tokens per second of the engine."""
        with runner.turn(), watch_use() as use:
            seconds = float(
                runner.run(Order([self._prompts(self._plan.at_once)], self._plan.answer))["seconds"]
            )
        return self._sample(seconds, use)

    async def over_service(self) -> dict[str, Any]:
        """The same through router and worker, until the last stream has ended."""
        prompts = self._prompts(self._plan.at_once)
        with watch_use() as use:
            begin = time.perf_counter()
            async with asyncio.timeout(self._plan.time_limit), asyncio.TaskGroup() as tasks:
                for prompt in prompts:
                    tasks.create_task(self._stream(prompt, self._plan.answer))
            seconds = time.perf_counter() - begin
        return self._sample(seconds, use)

    async def waits_for_first_token(self, worker: DirectWorker) -> tuple[float, float]:
        """Seconds beyond the worker's own time on the prompt: over HTTP, and from a worker without a router."""
        over_http, direct = self._prompts(2)
        async with asyncio.timeout(self._plan.time_limit):
            answer = await self._stream(over_http, 2)
            wait = await worker.waits_for_first_token(direct)
        assert answer.timings is not None
        return answer.ttft - float(answer.timings["prefill"]), wait

    async def _stream(self, prompt: list[int], num_tokens: int) -> Stream:
        server = self._server
        return await stream(self._session, server.url, server.model, prompt, num_tokens, wants_timings=True)

    def _prompts(self, count: int) -> Prompts:
        return random_prompts(self._rng, count, self._plan.prompt, self._plan.vocab_size)

    def _sample(self, seconds: float, use: Use) -> dict[str, Any]:
        return sample(self._plan.at_once * self._plan.answer / seconds, use)


async def _quiet(take: Callable[[], Awaitable[dict[str, Any]]], max_repeats: int) -> list[dict[str, Any]]:
    """Samples until one was not disturbed, or ``max_repeats`` more were."""
    samples = [await take()]
    while not samples[-1]["is_quiet"] and len(samples) <= max_repeats:
        samples.append(await take())
    return samples


def table(figures: dict[str, Any]) -> str:
    """The figures as Markdown."""
    plan, waits = figures["plan"], figures["wait_for_first_token_ms"]
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
    parser.add_argument("--threads", type=int, default=2, help="of the worker, and of the engine alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-repeats", type=int, default=3, help="of a sample that others disturbed")
    parser.add_argument(
        "--num-single", type=int, default=60, help="requests one at a time, for the first token"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
