"""``python -m benchmarks.service_speed --model DIR``: what the service costs beside the engine alone.

Throughput: 32 streams at once over HTTP through router and one aggregated worker, over the tokens per second of the engine
in one process at the same sizes; both live at the same time and take turns, and the engine is stopped while the service is
measured. Time to first token: what a client waits, less what the worker's own clock says that it computed on that prompt
(``timings``), one request at a time. To ``results/service_speed_<model>.json``; only ratios and differences are claims.
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
from typing import Any

import aiohttp

from benchmarks.engine import OURS
from benchmarks.facts import RESULTS, command_line, write_result
from benchmarks.gaps import percentile
from benchmarks.others import Use, end_on_sigterm, watch_use
from benchmarks.peers.work import Load, Prompts
from benchmarks.runners import Order, Program, Runner, random_prompts
from benchmarks.samples import sample, summary
from benchmarks.servers import Server, Start, kvbaton_server
from benchmarks.streams import Stream, stream


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
        found = asyncio.run(measure_service(plan, OURS, partial(_service, plan), Path(folder)))
    command = command_line("benchmarks.service_speed")
    figures = {"command": command, "model": given.model.name, **found}
    path = write_result(f"service_speed_{given.model.name}", figures, given.results)
    sys.stdout.write(f"{table(figures)}\n{path}\n")


async def measure_service(plan: Plan, program: Program, start: Start, folder: Path) -> dict[str, Any]:
    """Throughput in turns, then first tokens one at a time. Raises RunnerError, ServerError, StreamError.

    program: the engine alone. start: the service.
    """
    cores = tuple(sorted(os.sched_getaffinity(0)))[-plan.num_threads :]
    load = Load(str(plan.model), len(cores), 2048, plan.at_once, str(folder))
    rng, offline, served = random.Random(), list[dict[str, Any]](), list[dict[str, Any]]()
    with closing(Runner(program, load, folder / "engine.log", cores, plan.time_limit)) as runner:
        async with (
            start(folder) as server,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        ):
            asked = _Asked(plan, rng, server, session)
            await asked.over_service()  # both warm up
            await asked.offline(runner)
            for _ in range(plan.rounds):
                offline += await _quiet(partial(asked.offline, runner), plan.max_repeats)
                served += await _quiet(asked.over_service, plan.max_repeats)
            added = [await asked.added_to_first_token() for _ in range(plan.num_single)]
    alone, through = summary(offline), summary(served)
    return {
        "plan": {**asdict(plan), "model": plan.model.name},
        "offline": alone,
        "service": through,
        "service_over_offline": through["median"] / alone["median"],
        "added_to_ttft_ms": {"p50": percentile(added, 0.5), "p99": percentile(added, 0.99), "samples": added},
    }


def _service(plan: Plan, folder: Path) -> AbstractAsyncContextManager[Server]:
    arguments = ("--both", "1", "--num-threads", str(plan.num_threads), "--dtype", "bfloat16")
    return kvbaton_server(folder, plan.model, *arguments, time_limit=plan.time_limit)


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

    async def added_to_first_token(self) -> float:
        """Milliseconds that a client waits beyond the worker's own time on the prompt."""
        (prompt,) = self._prompts(1)
        async with asyncio.timeout(self._plan.time_limit):
            answer = await self._stream(prompt, 2)
        assert answer.timings is not None
        return 1000 * (answer.ttft - float(answer.timings["prefill"]))

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
    plan, added = figures["plan"], figures["added_to_ttft_ms"]
    rows = [
        ("engine alone, tokens/s", f"{figures['offline']['median']:.0f}{_noise(figures['offline'])}"),
        ("through the service, tokens/s", f"{figures['service']['median']:.0f}{_noise(figures['service'])}"),
        ("service over engine", f"{figures['service_over_offline']:.0%}"),
        ("added to the first token, p50", f"{added['p50']:.2f} ms"),
        ("added to the first token, p99", f"{added['p99']:.2f} ms"),
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
