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
"""Time limit of the answers to requests that were sent before the end of a load."""


@dataclass(frozen=True)
class Load:
    """A load. rate: long prompts per second; 0: chats only. seconds: time in which chats start and long prompts arrive."""

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
    """The result of one run of a load. figures: the part for the results."""

    rate: float
    chats: list[Latency]
    prompts: list[Latency]
    figures: dict[str, Any]

    @property
    def is_quiet(self) -> bool:
        """True if other processes did not use the cores."""
        return float(self.figures["other_cores"]) <= MAX_OTHER_CORES


async def quiet_run(server: Server, load: Load, max_repeats: int) -> Outcome:
    """Repeat the load until a run was undisturbed, at most ``max_repeats`` times; record the number of dropped runs."""
    outcome = await run_load(server, load)
    num_dropped = 0
    while not outcome.is_quiet and num_dropped < max_repeats:
        outcome = await run_load(server, load)
        num_dropped += 1
    return replace(outcome, figures={**outcome.figures, "num_dropped": num_dropped})


async def run_load(server: Server, load: Load) -> Outcome:
    """Run a load once. Raises StreamError, aiohttp.ClientError, TimeoutError."""
    rng = random.Random()
    chats = list[Stream]()
    prompts = list[Stream]()
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
    """Return the seconds to the first token of long prompts, sent one at a time to an idle server."""
    (warm_up, *prompts) = random_prompts(random.Random(), count + 1, load.long_prompt, load.vocab_size)
    async with asyncio.timeout(_GRACE_SECONDS), _session() as session:
        await stream(session, server.url, server.model, warm_up, 2)
        answers = [await stream(session, server.url, server.model, prompt, 1) for prompt in prompts]
    return [answer.ttft for answer in answers]


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**20)


def _cpu_seconds(server: Server) -> dict[str, float]:
    """Return the CPU seconds of this client, of each named process with its children, and of the whole server."""
    named = {name: cpu_seconds(tree(pid)) for name, pid in server.pids.items()}
    return {"client": cpu_seconds([os.getpid()]), **named, "server": cpu_seconds(tree(server.root))}
