"""A client of OpenAI's ``/v1/completions`` that records the arrival time of every token."""

import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

_DATA = b"data:"
_DONE = b"[DONE]"


class StreamError(Exception):
    """A server answered with an error, or with a wrong number of tokens."""


@dataclass
class Stream:
    """One answer. Times are in seconds on this process's clock. timings: kvbaton's own timings of the request."""

    sent: float
    arrivals: list[float] = field(default_factory=list)
    num_tokens: int = 0
    timings: dict[str, Any] | None = None

    @property
    def ttft(self) -> float:
        """The seconds to the first token."""
        return self.arrivals[0] - self.sent

    @property
    def tpot(self) -> float:
        """The seconds per token after the first one; 0 for an answer of one token."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.num_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """The seconds between consecutive arrivals."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]


async def stream(
    session: aiohttp.ClientSession,
    base: str,
    model: str,
    prompt: list[int],
    num_tokens: int,
    *,
    with_timings: bool = False,
) -> Stream:
    """Request ``num_tokens`` greedy tokens and read them all. Raises StreamError, aiohttp.ClientError, TimeoutError."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    if with_timings:
        body["timings"] = True
    answer = Stream(time.perf_counter())
    async with session.post(f"{base}/v1/completions", json=body) as response:
        if response.status != 200:
            raise StreamError(f"HTTP {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if line.startswith(_DATA) and not line.endswith(_DONE + b"\n"):
                _hear(answer, json.loads(line[len(_DATA) :]), time.perf_counter())
    if answer.num_tokens != num_tokens:
        raise StreamError(f"asked for {num_tokens} tokens, {answer.num_tokens} came")
    return answer


def _hear(answer: Stream, event: dict[str, Any], now: float) -> None:
    if "error" in event:
        raise StreamError(str(event["error"])[:300])
    num_tokens = sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ()))
    if num_tokens:
        answer.arrivals.append(now)
        answer.num_tokens += num_tokens
    if "kvbaton" in event:
        answer.timings = event["kvbaton"]["timings"]
