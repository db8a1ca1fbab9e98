"""A small real OpenAI service for tests of ``kvbaton chat``; the last message selects the answer."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from serving.http_server import start_http

TIMINGS = {"queue": 0.001, "prefill": 0.002, "transfer": 0.003, "end_to_end": 0.006, "transfer_hidden": 0.5}


class ChatService:
    """bodies: the requests received, in order. cancelled: set when a client left in the middle of the answer to "wait".

    "wait" sends one word and then nothing, "busy" is answered 429, "bad" 400, "broken" breaks off, "escape" answers a
    control sequence; everything else is repeated in capitals, in two pieces.
    """

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.cancelled = asyncio.Event()

    async def models(self, _: web.Request) -> web.Response:
        """GET /v1/models."""
        return web.json_response({"data": [{"id": "one"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        body = json.loads(await request.text())
        self.bodies.append(body)
        asked = body["messages"][-1]["content"]
        if asked == "busy":
            error = {"error": {"message": "the queue is full"}}
            return web.json_response(error, status=429, headers={"Retry-After": "3"})
        if asked == "bad":
            return web.json_response({"error": {"message": "that is no question"}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": keep-alive\n\n")
        await self._answer(response, asked)
        return response

    async def _answer(self, response: web.StreamResponse, asked: str) -> None:
        if asked == "wait":
            await _send(response, _text("first"))
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        if asked == "broken":
            await _send(response, _text("half"))
            await _send(response, {"error": {"message": "the worker is gone"}})
            return
        said = "\x1b[2Jgone" if asked == "escape" else asked.upper()
        await _send(response, _text(said[:2]))
        await _send(response, _text(said[2:]))
        await _send(response, {**_text("", "stop"), "kvbaton": {"timings": TIMINGS}})
        await _send(response, {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}})
        await response.write(b"data: [DONE]\n\n")


def _text(content: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": content}, "finish_reason": finish_reason}]}


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@asynccontextmanager
async def running_chat_service() -> AsyncIterator[ChatService]:
    """Run the service on a free port."""
    service = ChatService()
    app = web.Application()
    app.router.add_get("/v1/models", service.models)
    app.router.add_post("/v1/chat/completions", service.chat)
    server = await start_http(app, "127.0.0.1:0", shutdown_timeout_seconds=0.1)
    service.url = f"http://{server.address}"
    try:
        yield service
    finally:
        await server.close()
