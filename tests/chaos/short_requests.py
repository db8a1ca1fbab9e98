"""Many short concurrent requests over HTTP, on one prefill and one decode worker."""

import asyncio
import random
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.service import Service, running_service

AT_ONCE = 64
_MAX_TOKENS = 16
_PLACES = ("lake", "river", "hill", "forest", "house")
_POOLS = ("--prefill", "1", "--decode", "1", "--num-threads", "1", "--dtype", "float32")


@dataclass
class ShortReport:
    """The results of the requests; ``wrong`` counts each kind of mistake."""

    at_once: int = AT_ONCE
    num_whole: int = 0
    num_tokens: int = 0
    wrong: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


async def run_short_requests(folder: Path, rng: random.Random, *, num_requests: int) -> ShortReport:
    """Send ``num_requests`` different questions, ``AT_ONCE`` at a time, half of them streamed."""
    report = ShortReport()
    async with running_service(folder, *_POOLS) as service:
        numbers = iter(range(num_requests))
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=AT_ONCE)) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(AT_ONCE):
                own = random.Random(rng.getrandbits(64))
                tasks.create_task(_keep_asking(session, service, numbers, own, report))
    return report


async def _keep_asking(
    session: aiohttp.ClientSession, service: Service, numbers: Any, rng: random.Random, report: ShortReport
) -> None:
    for number in numbers:
        body = {
            "prompt": f"{number} The old moose sat near the {rng.choice(_PLACES)}",
            "max_tokens": rng.randint(1, _MAX_TOKENS),
            "ignore_eos": True,
            "seed": number,
            "stream": bool(number % 2),
        }
        try:
            wrong = await _ask(session, service, body)
        except (aiohttp.ClientError, TimeoutError) as error:
            wrong = type(error).__name__
        if wrong:
            report.wrong[wrong] += 1
        else:
            report.num_whole += 1
            report.num_tokens += int(body["max_tokens"])


async def _ask(session: aiohttp.ClientSession, service: Service, body: dict[str, Any]) -> str:
    """Return the mistake in the answer; empty if there is none."""
    request = {**body, "return_token_ids": True}
    async with session.post(f"http://{service.http}/v1/completions", json=request) as response:
        if response.status != 200:
            return f"status {response.status}"
        if body["stream"]:
            return _wrong_stream(await response.text())
        (choice,) = (await response.json())["choices"]
    is_whole = len(choice["token_ids"]) == body["max_tokens"] and choice["finish_reason"] == "length"
    return "" if is_whole else "a short answer"


def _wrong_stream(text: str) -> str:
    if not text.endswith("data: [DONE]\n\n"):
        return "a stream without its end"
    return "" if '"finish_reason":"length"' in text.replace(" ", "") else "a short stream"
