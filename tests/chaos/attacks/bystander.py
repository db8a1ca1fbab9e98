"""Another client of the attacked service: it sends short requests all the time and measures each answer's time."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import aiohttp

from tests.chaos.attacks.target import MODEL, Target

_PERIOD_SECONDS = 0.1
_PATIENCE_SECONDS = 30.0


@dataclass(frozen=True)
class Reply:
    """One answer: the time of the request, the seconds until its end, and whether it was whole."""

    began: float
    seconds: float
    is_whole: bool


@dataclass
class Bystander:
    """Sends requests and keeps the replies."""

    target: Target
    session: aiohttp.ClientSession
    replies: list[Reply] = field(default_factory=list)

    async def ask(self) -> Reply:
        """Send one request, and record the reply."""
        began, is_whole = time.monotonic(), False
        number = len(self.replies)
        body = {"model": MODEL, "prompt": f"{number} The old moose", "max_tokens": 4, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {self.target.bystander_key}"}
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self.session.post(
                f"http://{self.target.http}/v1/completions", json=body, headers=headers
            ) as response:
                await response.read()
                is_whole = response.status == 200
        reply = Reply(began, time.monotonic() - began, is_whole)
        self.replies.append(reply)
        return reply

    async def keep_asking(self) -> None:
        """Send ten requests a second until cancelled, without waiting for earlier answers."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self.ask())
                await asyncio.sleep(_PERIOD_SECONDS)

    def since(self, began: float, until: float) -> list[Reply]:
        """Return the replies to requests sent in this span of the monotonic clock."""
        return [reply for reply in self.replies if began <= reply.began < until]


@asynccontextmanager
async def bystander_of(target: Target) -> AsyncIterator[Bystander]:
    """Connect a bystander for the duration of the block."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=_PATIENCE_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield Bystander(target, session)


def p99(replies: list[Reply]) -> float:
    """Return the 99th percentile of the answers' seconds; a failed answer counts as the longest wait."""
    seconds = sorted(reply.seconds if reply.is_whole else _PATIENCE_SECONDS for reply in replies)
    return seconds[min(len(seconds) - 1, int(len(seconds) * 0.99))] if seconds else 0.0
