"""Sends requests to a running service over its two public APIs, OpenAI HTTP and gRPC."""

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import grpc
import grpc.aio

from cli.endpoint import Endpoint
from contract.errors import KvbatonError, OverloadedError, UnavailableError
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc

OnText = Callable[[str], None]
TIMING_PARTS = ("queue", "prefill", "transfer", "first_decode_step", "decode")
TIMING_NAMES = (*TIMING_PARTS, "end_to_end")


@dataclass(frozen=True)
class Answer:
    """A complete answer. timings: the latency breakdown in seconds, by TIMING_NAMES; empty when the service sent none."""

    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_completion_tokens: int
    timings: Mapping[str, float]


async def served_model(endpoint: Endpoint) -> str:
    """Return the id of the first served model. Raises UnavailableError when the service cannot be reached or serves none."""
    name, _ = await served_length(endpoint)
    return name


async def served_length(endpoint: Endpoint) -> tuple[str, int | None]:
    """Return the id of the first served model, and its longest prompt and answer in tokens if the service has one.

    Raises UnavailableError when the service cannot be reached or serves none.
    """
    url = endpoint.url
    async with endpoint.open_session() as session:
        reply = await _json(url, session.get(f"{url.rstrip('/')}/v1/models"))
    with openai_shape(url):
        models = reply["data"]
        if not models:
            raise UnavailableError(f"{url} serves no model yet; try again when its workers are ready")
        return str(models[0]["id"]), models[0].get("max_model_len")


async def ask_http(endpoint: Endpoint, path: str, body: Mapping[str, Any]) -> Answer:
    """POST ``body`` to /v1/``path`` ("chat/completions" or "completions") and return its first choice.

    ``"timings": true`` in the body requests the latency breakdown from kvbaton services. Raises UnavailableError when the
    service cannot be reached, KvbatonError with the service's own message for an error.
    """
    url = endpoint.url
    async with endpoint.open_session() as session:
        reply = await _json(url, session.post(f"{url.rstrip('/')}/v1/{path}", json=dict(body)))
    with openai_shape(url):
        choice = reply["choices"][0]
        usage = reply.get("usage") or {}
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return Answer(
            text=text or "",
            finish_reason=choice["finish_reason"] or "",
            num_prompt_tokens=usage.get("prompt_tokens", 0),
            num_completion_tokens=usage.get("completion_tokens", 0),
            timings=reply.get("kvbaton", {}).get("timings", {}),
        )


async def _json(url: str, request: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> dict[str, Any]:
    try:
        async with request as response:
            reply: dict[str, Any] = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise UnavailableError(f"{url} does not answer as an OpenAI service: {error}") from error
    with openai_shape(url):
        if "error" in reply:
            raise KvbatonError(f"{url} answered {response.status}: {reply['error']['message']}")
    return reply


@contextmanager
def openai_shape(url: str) -> Iterator[None]:
    """Turn the errors of reading a reply of another shape into UnavailableError."""
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        raise UnavailableError(f"{url} does not answer as an OpenAI service: {error!r}") from error


async def ask_grpc(endpoint: Endpoint, address: str, request: pb.GenerateRequest) -> Answer:
    """Call Generate on the gRPC port ``address`` and return the first choice.

    Raises UnavailableError with gRPC's own details.
    """
    parts: list[str] = []
    finish_reason = ""
    usage = pb.Usage()
    timings = pb.Timings()
    async with await endpoint.open_channel(address) as channel:
        try:
            stub = inference_pb2_grpc.InferenceStub(channel)
            async for reply in stub.Generate(request, metadata=tuple(endpoint.headers.items())):
                for choice in reply.choices:
                    parts.append(choice.text)
                    if choice.finish_reason:
                        name = pb.FinishReason.Name(choice.finish_reason)
                        finish_reason = name.removeprefix("FINISH_REASON_").lower()  # as HTTP has it
                if reply.HasField("usage"):
                    usage = reply.usage
                    timings = reply.timings
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"gRPC {address}: {error.code().name}, {error.details()}") from error
    return Answer(
        text="".join(parts),
        finish_reason=finish_reason,
        num_prompt_tokens=usage.prompt_tokens,
        num_completion_tokens=usage.completion_tokens,
        timings={name: getattr(timings, name) for name in TIMING_NAMES},
    )


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
        raise UnavailableError(f"{url} does not answer: {str(error) or type(error).__name__}") from error


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
    # Of SSE only what OpenAI's API uses: one "data" field in each event, in one line.
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
    # Without [DONE] the answer may be cut off anywhere, though HTTP's own framing was complete.
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
