"""Streams one chat completion over OpenAI's API."""

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from cli.ask import Answer, openai_shape
from cli.endpoint import Endpoint
from contract.errors import KvbatonError, OverloadedError, UnavailableError

OnText = Callable[[str], None]


@dataclass(frozen=True)
class StreamedAnswer(Answer):
    """A complete answer that was streamed. first_text_seconds: time from sending the request to the first text."""

    first_text_seconds: float | None = None


async def stream_chat(endpoint: Endpoint, body: Mapping[str, Any], on_text: OnText) -> StreamedAnswer:
    """POST ``body`` to /v1/chat/completions and call ``on_text`` with each piece of the answer when it arrives.

    Cancelling this closes the connection, and the service then cancels the request. Raises UnavailableError when the
    service cannot be reached or the connection breaks, OverloadedError for 429, KvbatonError with the service's own message
    for any other error; each is one line.
    """
    url = endpoint.url
    payload = {**body, "stream": True, "stream_options": {"include_usage": True}, "timings": True}
    try:
        async with (
            endpoint.open_session() as session,
            session.post(f"{url}/v1/chat/completions", json=payload) as response,
        ):
            if response.status != 200:
                raise await error_of(url, response)
            with openai_shape(url):
                return await _collect(url, response, on_text)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        reason = str(error) or type(error).__name__

        raise UnavailableError(f"{url} does not answer: {reason}") from error


async def _collect(url: str, response: aiohttp.ClientResponse, on_text: OnText) -> StreamedAnswer:
    began = time.monotonic()
    answer = StreamedAnswer("", "", 0, 0, {})
    pieces: list[str] = []
    async for event in events(url, response):
        if usage := event.get("usage"):
            answer = replace(
                answer,
                num_prompt_tokens=usage["prompt_tokens"],
                num_completion_tokens=usage["completion_tokens"],
            )
        for choice in event["choices"]:
            answer = replace(answer, finish_reason=choice["finish_reason"] or answer.finish_reason)
            if text := choice["delta"].get("content"):
                if not pieces:
                    answer = replace(answer, first_text_seconds=time.monotonic() - began)
                pieces.append(text)
                on_text(text)
        answer = replace(answer, timings=event.get("kvbaton", {}).get("timings", answer.timings))
    return replace(answer, text="".join(pieces))


async def events(url: str, response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of the stream. Raises KvbatonError for an error event, UnavailableError when it ends too early."""
    async for line in response.content:
        name, _, value = line.decode().partition(":")
        data = value.strip()
        if name != "data" or not data:
            continue  # a comment, or the end of an event
        if data == "[DONE]":
            return
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise KvbatonError(f"{url}: the answer was interrupted: {event['error']['message']}")
        yield event
    raise UnavailableError(f"{url}: the connection closed before the end of the answer")


async def error_of(url: str, response: aiohttp.ClientResponse) -> KvbatonError:
    """Return the error of a response whose status is not 200, in one line."""
    try:
        reply = await response.json(content_type=None)
        message = str(reply["error"]["message"])
    except (aiohttp.ClientError, ValueError, LookupError, TypeError):
        message = response.reason or "no reason given"
    text = f"{url} answered {response.status}: {message}"
    if response.status == 429:
        wait = response.headers.get("Retry-After")
        return OverloadedError(f"{text}; try again {f'in {wait} s' if wait else 'later'}")
    return KvbatonError(text)
