"""``python -m benchmarks.exits``: how soon workers that are stopped under load have left, to ``results/exits.json``.

Decode: a worker with many streams of long contexts, and as many tokens to come as the demo model has room for, is stopped
while another one is there; its answers move away. Prefill: one of two workers is stopped while prompts come all the time.
The time is from SIGTERM to the end of the process. Goals: 2 s for decode beside the transfer; for prefill 1 s, its last
lease not even subtracted; no request fails, and no fetch.
"""

import argparse
import asyncio
import json
import os
import random
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.facts import command_line, write_result
from tests.chaos.fleet import ROUTER, Fleet, role_of, running_fleet
from tests.chaos.held_resources import count, read_metrics
from tests.chaos.pool.moves import results_of_moves

DECODE_SECONDS = 2.0
PREFILL_SECONDS = 1.0
_VOCABULARY = 1456
_CONTEXT = 2048
_CACHE_BYTES = 320 * 2**20
_MORE_EVENTS = 5
_SETTLE_SECONDS = 240.0
_LOAD_SECONDS = 2.0
_LOOK_SECONDS = 0.02


@dataclass
class Asked:
    """One streamed request. num_events: what has arrived of it. error: why it failed."""

    num_events: int = 0
    is_over: bool = False
    error: str | None = None


@dataclass
class Clients:
    """Owns the requests of one scenario."""

    url: str
    rng: random.Random
    asked: list[Asked] = field(default_factory=list)

    async def ask(self, session: aiohttp.ClientSession, num_prompt: int, num_tokens: int) -> None:
        """Stream one request with a prompt of its own to its end."""
        one = Asked()
        self.asked.append(one)
        body = {
            "prompt": [self.rng.randrange(5, _VOCABULARY) for _ in range(num_prompt)],
            "max_tokens": num_tokens,
            "temperature": 1.0,
            "seed": self.rng.randrange(2**31),
            "ignore_eos": True,
            "stream": True,
        }
        async with session.post(self.url, json=body) as response:
            if response.status != 200:
                one.error = await response.text()
                return
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    one.error = one.error or (str(event["error"]) if "error" in event else None)
                    one.num_events += 1
        one.is_over = True

    async def keep_asking(self, session: aiohttp.ClientSession) -> None:
        """Send one request after the other until cancelled."""
        while True:
            await self.ask(session, 300, 4)

    async def until_each_has(self, num_more: int) -> None:
        """Wait until each open stream has received this many events more."""
        goals = [(one, one.num_events + num_more) for one in self.asked]
        async with asyncio.timeout(_SETTLE_SECONDS):
            await _until(
                lambda: all(one.is_over or one.error or one.num_events >= goal for one, goal in goals)
            )

    @property
    def errors(self) -> list[str]:
        """Return what has failed."""
        return [one.error for one in self.asked if one.error]


def main() -> None:
    """Run both scenarios, write the figures; the exit code is 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of each prompt of a decode stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, help="of a run to repeat")
    given = parser.parse_args()
    seed = secrets.randbelow(2**32) if given.seed is None else given.seed
    sys.stderr.write(f"exits: --seed {seed}\n")
    found: dict[str, Any] = {}
    for name, measure in (("decode", measure_decode), ("prefill", measure_prefill)):
        rounds = []
        for number in range(given.rounds):
            with tempfile.TemporaryDirectory(prefix="kvbaton-exits-") as folder:
                rng = random.Random(f"{seed}:{name}:{number}")
                rounds.append(asyncio.run(measure(Path(folder), rng, given.streams, given.prompt)))
                sys.stderr.write(f"{name}: {rounds[-1]}\n")
        found[name] = rounds
    errors = [error for rounds in found.values() for each in rounds for error in each["errors"]]
    figures = {"command": command_line("benchmarks.exits"), "seed": seed, **found, "is_clean": not errors}
    path = write_result("exits", figures)
    print(json.dumps(figures, indent=2), f"written to {path}", sep="\n")
    sys.exit(bool(errors))


async def measure_decode(
    folder: Path, rng: random.Random, num_streams: int, num_prompt: int
) -> dict[str, Any]:
    """Stop a decode worker with ``num_streams`` streams, all of which began there; return the figures."""
    async with _pool(folder, "prefill-0", "decode-0") as fleet, aiohttp.ClientSession() as session:
        clients = _clients(fleet, rng)
        async with asyncio.TaskGroup() as tasks:
            asking = [
                tasks.create_task(clients.ask(session, num_prompt, _CONTEXT - num_prompt))
                for _ in range(num_streams)
            ]
            await _until(lambda: len(clients.asked) == num_streams)
            await clients.until_each_has(_MORE_EVENTS)
            await _start(fleet, "decode-1")
            await _until_serving(fleet, "decode-1")
            figures = await _stopped(fleet, "decode-0")
            await clients.until_each_has(_MORE_EVENTS)
            for task in asking:
                task.cancel()
    return {**figures, "num_streams": num_streams, "errors": clients.errors}


async def measure_prefill(
    folder: Path, rng: random.Random, num_streams: int, _num_prompt: int
) -> dict[str, Any]:
    """Stop one of two prefill workers while prompts come all the time; return the figures."""
    names = ("prefill-0", "prefill-1", "decode-0")
    async with _pool(folder, *names) as fleet, aiohttp.ClientSession() as session:
        clients = _clients(fleet, rng)
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(clients.keep_asking(session)) for _ in range(num_streams // 4)]
            await asyncio.sleep(_LOAD_SECONDS)  # the time under load before
            figures = await _stopped(fleet, "prefill-0")
            await asyncio.sleep(_LOAD_SECONDS)  # the time under load afterwards
            texts = [
                await read_metrics(fleet.facts["decode-0"]["admin"])
            ]  # clients that leave end fetches too
            for task in asking:
                task.cancel()
        failed = count(texts, "kvbaton_transfer_failures_total")
    return {
        **figures,
        "num_failed_fetches": failed,
        "num_requests": len(clients.asked),
        "errors": clients.errors,
    }


async def _stopped(fleet: Fleet, name: str) -> dict[str, Any]:
    """Stop a worker; return the seconds until it has left, and what happened to the answers."""
    began = time.monotonic()
    code = await fleet.terminate(name)
    seconds = time.monotonic() - began
    text = await read_metrics(fleet.facts[ROUTER]["admin"])
    return {
        "exit_seconds": round(seconds, 3),
        "exit_code": code,
        "moves": dict(results_of_moves([text])),
        "replays": count([text], "kvbaton_request_replays_total"),
        "load_average": round(os.getloadavg()[0], 2),
    }


async def _until_serving(fleet: Fleet, name: str) -> None:
    """Wait until the router has the worker's credit."""
    async with asyncio.timeout(_SETTLE_SECONDS):
        while name not in await fleet.attached():  # noqa: ASYNC110 of another process
            await asyncio.sleep(_LOOK_SECONDS)  # an interval between readings


async def _until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110 it reads what other tasks have counted
        await asyncio.sleep(_LOOK_SECONDS)


@asynccontextmanager
async def _pool(folder: Path, *names: str) -> AsyncIterator[Fleet]:
    async with running_fleet(folder) as fleet:
        for name in names:
            await _start(fleet, name)
        await fleet.until_serving()
        yield fleet


async def _start(fleet: Fleet, name: str) -> None:
    await fleet.start_worker(name, role_of(name), kv_cache_bytes=_CACHE_BYTES)


def _clients(fleet: Fleet, rng: random.Random) -> Clients:
    return Clients(f"http://{fleet.facts[ROUTER]['http']}/v1/completions", rng)


if __name__ == "__main__":
    main()
