"""A small real OpenAI service for tests of ``kvbaton batch``, with scripted replies."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from cli.batch_files import PATHS
from serving.http_server import start_http


@dataclass
class Reply:
    """A scripted reply; status 0 closes the connection."""

    status: int = 200
    body: str = '{"ok": true}'
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class BatchService:
    """replies: those of the next requests; later requests are answered 200. asked: the requests received, in order."""

    url: str = ""
    replies: list[Reply] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    num_at_once: int = 0
    max_at_once: int = 0

    async def answer(self, request: web.Request) -> web.Response:
        """Answer POST of any path."""
        self.num_at_once += 1
        self.max_at_once = max(self.max_at_once, self.num_at_once)
        self.raw.append(await request.read())
        self.asked.append(json.loads(self.raw[-1]))
        self.keys.append(request.headers.get("Authorization"))
        reply = self.replies.pop(0) if self.replies else Reply()
        self.num_at_once -= 1
        if not reply.status:
            assert request.transport is not None
            request.transport.close()
        return web.Response(
            status=reply.status or 200,
            text=reply.body,
            headers={"x-request-id": f"req-{len(self.raw)}", **reply.headers},
            content_type="application/json",
        )


@asynccontextmanager
async def running_batch_service() -> AsyncIterator[BatchService]:
    """Run the service on a free port."""
    service = BatchService()
    app = web.Application()
    for path in PATHS:
        app.router.add_post(path, service.answer)
    server = await start_http(app, "127.0.0.1:0", shutdown_timeout_seconds=0.1)
    service.url = f"http://{server.address}"
    try:
        yield service
    finally:
        await server.close()
