"""Answers of every API in one form, and their comparison with those of an undisturbed run; requests over HTTP."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp

from tests.chaos.pool.questions import MixedQuestion

ACCEPTED = 200
UNAVAILABLE = 503
ANSWER_SECONDS = 180.0
CLOSENESS = 1e-3
"""Largest difference between two log probabilities of the same token, computed in different batches."""


class Way(StrEnum):
    """The form in which a client asks and is answered."""

    WHOLE = "whole"
    STREAM = "streamed"
    GRPC = "gRPC"


@dataclass
class Choice:
    """One answer. calls: names and arguments of its tool calls."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    calls: dict[int, str] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""


@dataclass
class MixedAnswer:
    """An answer as a client received it.

    status: that of HTTP; 0 if no response came. arrivals: times of a stream's events.
    """

    question: MixedQuestion
    way: Way
    choices: list[Choice]
    status: int = 0
    error: str = ""
    arrivals: list[float] = field(default_factory=list)

    @classmethod
    def empty(cls, question: MixedQuestion, way: Way) -> "MixedAnswer":
        """Return an answer of which nothing has arrived."""
        return cls(question, way, [Choice() for _ in range(question.num_choices)])

    @property
    def is_whole(self) -> bool:
        """True if every choice has ended."""
        return not self.error and all(choice.finish_reason for choice in self.choices)


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    question: MixedQuestion,
    *,
    is_streamed: bool,
    salt: str = "",
    seconds: float = ANSWER_SECONDS,
) -> MixedAnswer:
    """Ask over HTTP; return the answer, or its beginning before an error."""
    answer = MixedAnswer.empty(question, Way.STREAM if is_streamed else Way.WHOLE)
    body = {**question.body, "stream": is_streamed, **({"cache_salt": salt} if salt else {})}
    try:
        async with asyncio.timeout(seconds), session.post(f"{url}{question.path}", json=body) as response:
            answer.status = response.status
            if is_streamed and response.status == ACCEPTED:
                await _read_stream(answer, response)
            else:
                _take_whole(answer, await response.json())
    except (aiohttp.ClientError, ConnectionError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    except TimeoutError:
        answer.error = f"no end within {seconds:g} s"
    return answer


async def _read_stream(answer: MixedAnswer, response: aiohttp.ClientResponse) -> None:
    is_done = False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        payload = line.removeprefix(b"data: ").strip()
        is_done = payload == b"[DONE]"
        if is_done:
            continue
        event = json.loads(payload)
        answer.arrivals.append(time.monotonic())
        if "error" in event:
            answer.error = str(event["error"]["message"])
            return
        for part in event["choices"]:
            _take_part(answer.choices[part["index"]], part, part.get("delta") or {})
    if not is_done:
        answer.error = "the stream ended without [DONE]"


def _take_whole(answer: MixedAnswer, reply: dict[str, Any]) -> None:
    if "error" in reply:
        answer.error = str(reply["error"]["message"])
        return
    for part in reply["choices"]:
        _take_part(answer.choices[part["index"]], part, part.get("message") or {})


def _take_part(choice: Choice, part: dict[str, Any], message: dict[str, Any]) -> None:
    choice.token_ids += part.get("token_ids") or []
    choice.text += part.get("text") or message.get("content") or ""
    choice.finish_reason = part.get("finish_reason") or choice.finish_reason
    choice.logprobs += (part.get("logprobs") or {}).get("token_logprobs") or []
    for place, call in enumerate(message.get("tool_calls") or []):
        function = call.get("function") or {}
        written = (function.get("name") or "") + (function.get("arguments") or "")
        index = call.get("index", place)
        choice.calls[index] = choice.calls.get(index, "") + written


def mistake_in(answer: MixedAnswer, reference: MixedAnswer) -> str | None:
    """Return None for the reference's answer, or for a beginning of it before an error; else what is wrong with it."""
    for number, (ours, right) in enumerate(zip(answer.choices, reference.choices, strict=True)):
        if wrong := _mistake(ours, right, is_whole=answer.is_whole):
            question = answer.question
            return f"question {question.number} ({question.kind}, {answer.way}), choice {number}: {wrong}"
    return None


def _mistake(ours: Choice, right: Choice, *, is_whole: bool) -> str | None:
    if wrong := _wrong_tokens(ours.token_ids, right.token_ids, is_whole=is_whole):
        return wrong
    if not right.text.startswith(ours.text):
        return "changed: the text differs"
    pairs = zip(ours.logprobs, right.logprobs, strict=False)
    if any(abs(a - b) > CLOSENESS for a, b in pairs):
        return "changed: a log probability differs"
    if not is_whole:
        return None
    if (ours.text, ours.calls, ours.finish_reason) != (right.text, right.calls, right.finish_reason):
        return "changed: the end, the text or a tool call differs"
    return None if len(ours.logprobs) == len(right.logprobs) else "missing: log probabilities"


def _wrong_tokens(ours: list[int], right: list[int], *, is_whole: bool) -> str | None:
    """Return a description that begins with duplicated, missing or changed; None for the right tokens."""
    same = next((i for i, pair in enumerate(zip(ours, right, strict=False)) if pair[0] != pair[1]), None)
    if same is None:
        if len(ours) > len(right):
            return f"duplicated: {len(ours)} tokens instead of {len(right)}"
        is_short = is_whole and len(ours) < len(right)
        return f"missing: {len(ours)} tokens instead of {len(right)}" if is_short else None
    rest = ours[same:]
    for place in range(len(right)):
        if right[place : place + len(rest)] == rest:
            return (
                f"{'duplicated' if place < same else 'missing'}: from token {same} on, those from {place} on"
            )
    return f"changed: token {same} is {ours[same]} instead of {right[same]}"
