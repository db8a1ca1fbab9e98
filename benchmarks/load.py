"""The load of ``benchmarks.interference``: closed-loop chats, and long prompts that arrive at a fixed rate."""

import asyncio
import os
import random
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import aiohttp

from benchmarks.gaps import Latency, latencies, of_chats, of_prompts
from benchmarks.others import cpu_seconds, tree, watch_use
from benchmarks.runners import random_prompts
from benchmarks.samples import MAX_OTHER_CORES
from benchmarks.servers import Server
from benchmarks.streams import Stream, stream

_GRACE_SECONDS = 120.0
"""What was asked before the end of a load is answered within this time, or the run fails."""


@dataclass(frozen=True)
class Load:
    """rate: long prompts per second; 0 is the chats alone. seconds: how long chats begin and long prompts arrive."""

    vocab_size: int
    rate: float
    seconds: float
    num_chats: int = 4
    chat_prompt: int = 64
    chat_answer: int = 64
    long_prompt: int = 1024
    long_answer: int = 8


@dataclass(frozen=True)
class Outcome:
    """One run of a load. figures: what goes into the results."""

    rate: float
    chats: list[Latency]
    prompts: list[Latency]
    figures: dict[str, Any]

    @property
    def is_quiet(self) -> bool:
        """Other processes left the cores alone."""
        return float(self.figures["other_cores"]) <= MAX_OTHER_CORES


async def quiet_run(server: Server, load: Load, max_repeats: int) -> Outcome:
    """Run it until nobody disturbed, at most ``max_repeats`` times more; tells how many runs were dropped."""
    outcome, num_dropped = await run_load(server, load), 0
    while not outcome.is_quiet and num_dropped < max_repeats:
        outcome, num_dropped = await run_load(server, load), num_dropped + 1
    return replace(outcome, figures={**outcome.figures, "num_dropped": num_dropped})


async def run_load(server: Server, load: Load) -> Outcome:
    """Raises StreamError, aiohttp.ClientError, TimeoutError."""
    rng, chats, prompts = random.Random(), list[Stream](), list[Stream]()
    begin_cpu = _cpu_seconds(server)
    begin = time.perf_counter()
    end = begin + load.seconds
    with watch_use() as use:
        async with (
            asyncio.timeout(load.seconds + _GRACE_SECONDS),
            _session() as session,
            asyncio.TaskGroup() as tasks,
        ):

            async def ask(into: list[Stream], num_tokens: int, num_new: int) -> None:
                (prompt,) = random_prompts(rng, 1, num_tokens, load.vocab_size)
                into.append(await stream(session, server.url, server.model, prompt, num_new))

            async def chat() -> None:
                while time.perf_counter() < end:
                    await ask(chats, load.chat_prompt, load.chat_answer)

            for _ in range(load.num_chats):
                tasks.create_task(chat())
            for number in range(int(load.rate * load.seconds)):
                await asyncio.sleep(max(0.0, begin + (number + 0.5) / load.rate - time.perf_counter()))
                tasks.create_task(ask(prompts, load.long_prompt, load.long_answer))
        wall = time.perf_counter() - begin
    cores = {name: (now - begin_cpu[name]) / wall for name, now in _cpu_seconds(server).items()}
    figures = {
        "load": asdict(load),
        "chats": of_chats(chats, max((chat.arrivals[-1] for chat in chats), default=begin) - begin),
        "long_prompts": of_prompts(prompts),
        "cores": cores,
        "other_cores": use.other_cores,
    }
    return Outcome(load.rate, latencies(chats), latencies(prompts), figures)


async def seconds_alone(server: Server, load: Load, count: int) -> list[float]:
    """Seconds to the first token of long prompts, one at a time, with nothing else to do."""
    (warm_up, *prompts) = random_prompts(random.Random(), count + 1, load.long_prompt, load.vocab_size)
    async with asyncio.timeout(_GRACE_SECONDS), _session() as session:
        await stream(session, server.url, server.model, warm_up, 2)
        answers = [await stream(session, server.url, server.model, prompt, 1) for prompt in prompts]
    return [answer.ttft for answer in answers]


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**20)


def _cpu_seconds(server: Server) -> dict[str, float]:
    """Of this client, of each named process with its children, and of the whole server."""
    named = {name: cpu_seconds(tree(pid)) for name, pid in server.pids.items()}
    return {"client": cpu_seconds([os.getpid()]), **named, "server": cpu_seconds(tree(server.root))}
