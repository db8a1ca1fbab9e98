"""A proxy in front of a service that records the usage of each request with tools."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

_DROPPED = ("host", "content-length", "accept-encoding", "transfer-encoding")


@dataclass(frozen=True)
class Turn:
    """One answered request. num_cached: tokens of its prompt that came from the prefix cache."""

    body: str
    num_tokens: int
    num_cached: int


@dataclass
class Recorder:
    """The turns with tools so far, in order, and the address of the proxy."""

    url: str = ""
    turns: list[Turn] = field(default_factory=list)

    def record(self, body: bytes, answer: bytes) -> None:
        """Keep the usage at the end of a stream, if the request has tools."""
        if not body or not json.loads(body).get("tools"):
            return
        for line in answer.decode().splitlines():
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
            usage = event.get("usage") or event.get("response", {}).get("usage")
            if usage:
                details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
                num_tokens = usage.get("prompt_tokens") or usage["input_tokens"]
                self.turns.append(Turn(body.decode(), num_tokens, details["cached_tokens"]))


@asynccontextmanager
async def recording(upstream: str) -> AsyncIterator[Recorder]:
    """Run the proxy in front of the service at this URL."""
    recorder = Recorder()

    async def forward(request: web.Request) -> web.Response:
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _DROPPED}
        async with session.request(
            request.method, f"{upstream}{request.rel_url}", data=body, headers=headers
        ) as response:
            answer = await response.read()
            recorder.record(body, answer)
            shown = {"Content-Type": response.headers.get("Content-Type", "application/json")}
            return web.Response(status=response.status, body=answer, headers=shown)

    app = web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app)
    async with aiohttp.ClientSession() as session:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        recorder.url = f"http://{host}:{port}"
        try:
            yield recorder
        finally:
            await runner.cleanup()
