"""Chats at a rate that a test changes, whose answers are known: the scripted model answers with the user's message."""

import asyncio
import json
import random
import string
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_PAUSE_SECONDS = 0.05
"""Between two looks at the rate, which a test may have changed."""
_ANSWER_SECONDS = 120.0


@dataclass
class Chats:
    """A load. rate: chats per second. length: characters, and tokens, of a message. most: tokens of an answer; None: all.

    wrong: answers that were not whole, not the message, or an error. num_right: the others.
    """

    rate: float = 0.0
    length: int = 100
    most: int | None = None
    num_right: int = 0
    wrong: list[str] = field(default_factory=list)

    async def ask(self, session: aiohttp.ClientSession, url: str) -> None:
        """Send one chat and compare its stream, token by token."""
        text = "".join(random.choices(string.ascii_lowercase, k=self.length))
        expected = text if self.most is None else text[: self.most]
        body = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.most or self.length + 1,
            "stream": True,
        }
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                answer = await _answer(session, url, body)
        except (aiohttp.ClientError, TimeoutError) as error:
            answer = repr(error)
        if answer == expected:
            self.num_right += 1
        else:
            self.wrong.append(f"{answer!r} is not {expected!r}")


async def _answer(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> str:
    """Return the text of a stream; that of an error, or a remark, if it is not whole."""
    found = ""
    ending = None
    async with session.post(url, json=body) as response:
        async for line in response.content:
            event = line.removeprefix(b"data: ").strip() if line.startswith(b"data: ") else b""
            if event == b"[DONE]":
                return found if ending in ("stop", "length") else f"{found} (ended by {ending})"
            if event:
                choices = json.loads(event).get("choices")
                if choices is None:
                    return event.decode()
                for choice in choices:
                    found += choice["delta"].get("content") or ""
                    ending = choice["finish_reason"] or ending
    return f"{found} (cut off)"


@asynccontextmanager
async def chatting(http: str, rate: float, **lengths: Any) -> AsyncIterator[Chats]:
    """Send chats within the block, whatever the service does; all have ended after it."""
    chats = Chats(rate, **lengths)
    url = f"http://{http}/v1/chat/completions"
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tasks:

        async def send() -> None:
            loop = asyncio.get_running_loop()
            due = loop.time()
            while True:
                if chats.rate > 0 and loop.time() >= due:
                    due = max(due, loop.time() - 1.0) + 1.0 / chats.rate
                    tasks.create_task(chats.ask(session, url))
                await asyncio.sleep(_PAUSE_SECONDS)

        sending = tasks.create_task(send())
        try:
            yield chats
        finally:
            sending.cancel()
