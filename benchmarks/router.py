"""Measures what one router process passes per second of its own CPU time, without an engine.

    python -m benchmarks.router [--rounds 3] [--only streams,completions,workers,idle,two]

The workers (``benchmarks.router_worker``) and the clients are parts of this process. The router is another one, whose CPU
seconds are counted, so that other processes change the figures little.

- streams: 64 concurrent streams from a pair that hands over; a worker sends one message a step, with a token of each.
- completions: answers of two tokens, each on a connection of its own, by one worker and by a pair, for few and for many
  clients at once.
- workers: the same streams from one and from many workers. Each worker sends a message a step, so the more workers, the
  fewer tokens a message has, and the router's work for a message weighs more.
- two: twice as many streams over two routers, which share the workers; per CPU second of the router that used more.
- idle: streams that are open and silent: the router's memory, and its descriptors before, during and after them.
"""

import argparse
import asyncio
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.facts import RESULTS, command_line, write_result
from benchmarks.router_clients import (
    CHATS,
    COMPLETIONS,
    OpenStream,
    complete,
    open_stream,
    stream,
    stream_grpc,
)
from benchmarks.router_worker import SteppingWorker, attached
from benchmarks.servers import RouterProcess, router_process
from contract.identity import Role
from serving.http_acceptor import raise_descriptor_limit
from text.model_card import ModelCard

MODEL = Path(__file__).parents[1] / "kvbaton" / "demo_model"
PARTS = ("streams", "completions", "workers", "idle", "two")
_ANSWERS = Path(__file__).parents[1] / "README.md"
_START_SECONDS = 60.0
_PAIR = (Role.PREFILL, Role.DECODE)
_ALONE = (Role.AGGREGATED,)
_CLOSED_DESCRIPTORS = 8
"""Descriptors beyond those before that a router may have when its streams have ended."""


@dataclass(frozen=True)
class Plan:
    """The sizes of a run. few, many: concurrent clients. fan_in: numbers of workers. time_limit: in seconds."""

    num_streams: int = 64
    num_tokens: int = 500
    step_seconds: float = 0.012
    num_completions: int = 2000
    few: int = 16
    many: int = 64
    num_idle: int = 10_000
    fan_in: tuple[int, ...] = (1, 16, 64)
    rounds: int = 3
    time_limit: float = 600.0


@dataclass(frozen=True)
class Bench:
    """Routers with their workers. router: the first one."""

    plan: Plan
    routers: list[RouterProcess]
    workers: list[SteppingWorker]

    @property
    def router(self) -> RouterProcess:
        """The first router, which most parts measure alone."""
        return self.routers[0]

    async def streams(self, one: Callable[[int], Coroutine[Any, Any, None]]) -> dict[str, float]:
        """Measure concurrent streams, each of which ``one`` reads, in tokens."""
        plan = self.plan

        async def read_all() -> None:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(plan.num_streams):
                    tasks.create_task(one(plan.num_tokens))

        return await self._per_cpu_second(plan.num_streams * plan.num_tokens, read_all())

    async def shared(self) -> dict[str, float]:
        """Measure concurrent streams over all routers, as many for each as ``streams`` has."""
        plan = self.plan

        async def read_all() -> None:
            async with asyncio.TaskGroup() as tasks:
                for router in self.routers:
                    for _ in range(plan.num_streams):
                        tasks.create_task(stream(router.http, COMPLETIONS, plan.num_tokens))

        num_tokens = len(self.routers) * plan.num_streams * plan.num_tokens
        return await self._per_cpu_second(num_tokens, read_all())

    async def completions(self, at_once: int) -> dict[str, float]:
        """Measure answers of two tokens for so many concurrent clients."""
        left = iter(range(self.plan.num_completions))

        async def client() -> None:
            for _ in left:
                await complete(self.router.http, COMPLETIONS, 2)

        async def all_clients() -> None:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(at_once):
                    tasks.create_task(client())

        return await self._per_cpu_second(self.plan.num_completions, all_clients())

    async def idle(self) -> dict[str, float]:
        """Open streams that are silent after their first token, look at the router, and let them end."""
        before = self._process_facts()
        for worker in self.workers:
            worker.idle_after = 1
        places = asyncio.Semaphore(self.plan.few)
        opened: list[OpenStream] = []

        async def open_one() -> None:
            async with places:
                opened.append(await open_stream(self.router.http, COMPLETIONS, 4))
                await opened[-1].read_event()

        async with asyncio.timeout(self.plan.time_limit):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self.plan.num_idle):
                    tasks.create_task(open_one())
            during = self._process_facts()
            for worker in self.workers:
                worker.resume()
            await asyncio.gather(*(each.read_to_end() for each in opened))
            most = before["descriptors"] + _CLOSED_DESCRIPTORS
            while self._process_facts()["descriptors"] > most:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.2)
        moments = {"before": before, "during": during, "after": self._process_facts()}
        return {f"{name}_{when}": value for when, facts in moments.items() for name, value in facts.items()}

    def _process_facts(self) -> dict[str, int]:
        process = psutil.Process(self.router.pid)
        return {"bytes": process.memory_info().rss, "descriptors": process.num_fds()}

    async def _per_cpu_second(self, count: int, work: Awaitable[None]) -> dict[str, float]:
        """Do ``work``, in which ``count`` units pass the routers, and divide them by the CPU seconds of the busiest one."""
        before = [_cpu_seconds(router.pid) for router in self.routers]
        begin = time.perf_counter()
        async with asyncio.timeout(self.plan.time_limit):
            await work
        seconds = time.perf_counter() - begin
        used = max(
            _cpu_seconds(router.pid) - former for router, former in zip(self.routers, before, strict=True)
        )
        return {"per_cpu_second": count / used, "cpu_seconds": used, "seconds": seconds}


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process so far; its clock id is that of glibc's ``clock_getcpuclockid``."""
    return time.clock_gettime((~pid << 3) | 2)


@asynccontextmanager
async def running_bench(
    plan: Plan, roles: tuple[Role, ...], *arguments: str, num_routers: int = 1
) -> AsyncIterator[Bench]:
    """Run routers with these arguments and one worker of each role."""
    card = ModelCard.from_folder(MODEL)
    ids = card.tokenizer.encode(_ANSWERS.read_text(), add_special_tokens=False)
    # A part of a character is no text yet: a stream that is silent behind it would have sent nothing.
    texts = {token_id: card.tokenizer.decode([token_id]) for token_id in set(ids)}
    ids = [token_id for token_id in ids if texts[token_id] and "\ufffd" not in texts[token_id]]
    secret = secrets.token_hex(16)
    async with AsyncExitStack() as stack:
        routers = []
        for _ in range(num_routers):
            folder = Path(stack.enter_context(TemporaryDirectory()))
            routers.append(
                await stack.enter_async_context(
                    router_process(folder, secret, MODEL, *arguments, time_limit=_START_SECONDS)
                )
            )
        internal = [router.internal for router in routers]
        workers = [SteppingWorker(ids, plan.step_seconds) for _ in roles]
        for worker, role in zip(workers, roles, strict=True):
            await stack.enter_async_context(attached(worker, role, internal, secret, card))
        for router in routers:
            await complete(router.http, COMPLETIONS, 2)
        yield Bench(plan, routers, workers)


async def measure_router(plan: Plan, parts: tuple[str, ...] = PARTS) -> dict[str, Any]:
    """Measure these parts."""
    figures: dict[str, Any] = {"plan": asdict(plan)}
    if "streams" in parts:
        async with running_bench(plan, _PAIR) as bench:
            http = bench.router.http
            ways = {
                "completions": partial(stream, http, COMPLETIONS),
                "chats": partial(stream, http, CHATS),
                "grpc": partial(stream_grpc, bench.router.grpc),
            }
            figures["streams"] = {
                name: await _median(plan, partial(bench.streams, way)) for name, way in ways.items()
            }
    if "completions" in parts:
        figures["completions"] = {}
        for name, roles in (("one_worker", _ALONE), ("pair", _PAIR)):
            async with running_bench(plan, roles) as bench:
                figures["completions"][name] = {
                    str(at_once): await _median(plan, partial(bench.completions, at_once))
                    for at_once in (plan.few, plan.many)
                }
    if "workers" in parts:
        figures["workers"] = {}
        for num_workers in plan.fan_in:
            async with running_bench(plan, _ALONE * num_workers) as bench:
                one = partial(stream, bench.router.http, COMPLETIONS)
                figures["workers"][str(num_workers)] = await _median(plan, partial(bench.streams, one))
    if "two" in parts:
        figures["two"] = {}
        for num_routers in (1, 2):
            async with running_bench(plan, _PAIR, num_routers=num_routers) as bench:
                figures["two"][str(num_routers)] = await _median(plan, bench.shared)
    if "idle" in parts:
        most = str(plan.num_idle + plan.few)
        limits = ("--max-connections", most, "--max-connections-per-address", most)
        async with running_bench(plan, _ALONE, *limits) as bench:
            figures["idle"] = await bench.idle()
    return figures


async def _median(plan: Plan, take: Callable[[], Awaitable[dict[str, float]]]) -> dict[str, Any]:
    samples = [await take() for _ in range(plan.rounds)]
    return {"median": statistics.median(one["per_cpu_second"] for one in samples), "samples": samples}


def table(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    plan = figures["plan"]
    names = {"completions": "completions", "chats": "chats", "grpc": "gRPC"}
    rows = [
        (f"tokens of {plan['num_streams']} streams, {names[way]}", f"{found['median']:,.0f}")
        for way, found in figures.get("streams", {}).items()
    ]
    rows += [
        (f"answers of two tokens, {name.replace('_', ' ')}, {at_once} clients", f"{found['median']:,.0f}")
        for name, ways in figures.get("completions", {}).items()
        for at_once, found in ways.items()
    ]
    rows += [
        (
            f"tokens of {plan['num_streams']} streams, {count} aggregated worker{'s'[: int(count) > 1]}",
            f"{found['median']:,.0f}",
        )
        for count, found in figures.get("workers", {}).items()
    ]
    if two := figures.get("two"):
        one, both = (two[number]["median"] for number in ("1", "2"))
        rows.append(("tokens over two routers", f"{both:,.0f} ({both / one:.2f} times one)"))
    if idle := figures.get("idle"):
        used = (idle["bytes_during"] - idle["bytes_before"]) / plan["num_idle"] / 1024
        rows += [
            (f"memory with {plan['num_idle']:,} silent streams", f"{idle['bytes_during'] / 2**20:,.0f} MiB"),
            ("memory of one silent stream", f"{used:,.1f} KiB"),
            (
                "descriptors before, during, after",
                "{descriptors_before}, {descriptors_during}, {descriptors_after}".format(**idle),
            ),
        ]
    return "| per second of the router's CPU time | |\n| --- | --- |\n" + "\n".join(
        f"| {name} | {value} |" for name, value in rows
    )


def main() -> None:
    """Measure, print the table and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=Plan.rounds)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the figures")
    given = parser.parse_args()
    raise_descriptor_limit()
    parts = tuple(given.only.split(","))
    figures = asyncio.run(measure_router(Plan(rounds=given.rounds), parts))
    print(table(figures))
    name = "router_demo" if set(parts) == set(PARTS) else f"router_{'_'.join(parts)}"
    write_result(name, {"command": command_line("benchmarks.router"), **figures}, given.results)


if __name__ == "__main__":
    main()
