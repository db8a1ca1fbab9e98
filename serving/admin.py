"""The admin port of a process: ``/health``, ``/ready``, ``/metrics``, ``/debug/state``; plain HTTP, no API key.

A process may add routes. A request that changes something, or that is for a route below ``/admin``, is checked. The facts of
a process are what it is, and plain numbers that show leaks.
"""

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from math import isfinite
from typing import Any

import msgspec
import psutil
from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware
from prometheus_client.registry import Collector

from contract.errors import InvalidRequestError, KvbatonError, UnauthenticatedError
from contract.options import MAX_SECONDS
from serving.admin_access import SAFE_METHODS, AdminAccess
from serving.errors import http_status, openai_error
from serving.http_hosts import HostCheck
from serving.http_server import HttpServer, start_http
from serving.metrics import CONTENT_TYPE, render

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_OPERATORS = "/admin"


class AdminServer:
    """Serves the pages on ``address`` between ``start`` and ``stop``.

    missing: returns what the process lacks to do its work, or None; shown by ``/health`` and ``/ready``. degraded:
    returns why it does it worse than it should; shown by ``/health``. not_ready: returns
    another reason why it accepts no new work; shown by ``/ready`` only. state: returns plain data for ``/debug/state``, to
    which the process's own facts are added as ``process``. metrics: returns a collector of the current values; None: no
    such page. allowed_hosts: valid names in the Host header beside localhost. access: decides who may use an action (any
    method but GET and HEAD) and the paths below ``/admin``; None: no one. routes: further paths.
    """

    def __init__(
        self,
        address: str,
        *,
        missing: Callable[[], str | None],
        degraded: Callable[[], str | None] = lambda: None,
        not_ready: Callable[[], str | None] = lambda: None,
        state: Callable[[], Awaitable[dict[str, Any]]],
        metrics: Callable[[], Awaitable[Collector]] | None = None,
        allowed_hosts: tuple[str, ...] = (),
        access: AdminAccess | None = None,
        routes: Iterable[web.RouteDef] = (),
    ) -> None:
        self._asked_address = address
        self._missing = missing
        self._degraded = degraded
        self._not_ready = not_ready
        self._state = state
        self._metrics = metrics
        self._access = access
        self._routes = tuple(routes)
        self._hosts = HostCheck(address, allowed_hosts, refuses_origins=True)
        self._server: HttpServer | None = None

    @property
    def address(self) -> str:
        """The actual "host:port" while it listens, else the configured one."""
        return self._server.address if self._server else self._asked_address

    async def start(self) -> None:
        """Start to listen. Raises SettingError when the address cannot be bound."""
        app = web.Application(middlewares=[self._hosts.middleware, self._access_middleware])
        app.router.add_get("/health", self._get_health)
        app.router.add_get("/ready", self._get_ready)
        if metrics := self._metrics:

            async def get_metrics(_: web.Request) -> web.Response:
                return web.Response(body=render(await metrics()), headers={"Content-Type": CONTENT_TYPE})

            app.router.add_get("/metrics", get_metrics)
        app.router.add_get("/debug/state", self._get_state)
        app.router.add_routes(self._routes)
        self._server = await start_http(app, self._asked_address, param="admin", shutdown_timeout_seconds=1.0)

    async def stop(self) -> None:
        """Stop listening; do nothing when it does not listen."""
        if self._server:
            server = self._server
            self._server = None
            await server.close()

    @property
    def _access_middleware(self) -> Middleware:
        """A middleware that checks the access, and answers errors with their reason."""

        @web.middleware
        async def check(request: web.Request, handler: _Handler) -> web.StreamResponse:
            try:
                # Actions are recognized by their method, not by a list of paths: a route that is added later is closed, too.
                # For pages the route that matches counts, and not the path as sent.
                resource = request.match_info.route.resource
                path = request.path if resource is None else resource.canonical
                if request.method not in SAFE_METHODS or path.startswith(_OPERATORS):
                    if self._access is None:
                        raise web.HTTPForbidden(reason="this port has no actions")
                    self._access.check(request)
                return await handler(request)
            except KvbatonError as error:
                response = web.json_response(openai_error(error), status=http_status(error.kind))
                if isinstance(error, UnauthenticatedError):
                    response.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
                return response
            except web.HTTPForbidden as error:
                return web.json_response({"error": {"message": error.reason}}, status=error.status)

        return check

    async def _get_health(self, _: web.Request) -> web.Response:
        return health_response(self._missing(), self._degraded())

    async def _get_ready(self, _: web.Request) -> web.Response:
        return health_response(self._not_ready() or self._missing())

    async def _get_state(self, _: web.Request) -> web.Response:
        # The unfinished tasks include the one that answers this request.
        process = {**facts_of(os.getpid()), "num_asyncio_tasks": len(asyncio.all_tasks())}
        return json_answer({**await self._state(), "process": process})


def json_answer(data: Any, *, status: int = 200) -> web.Response:
    """Return plain data as JSON that every parser reads: a number that is not finite is null, another type its text."""
    return web.json_response(body=msgspec.json.encode(data, enc_hook=str), status=status)


def seconds_in(request: web.Request, name: str) -> float | None:
    """Return a time in the query, or None if it is not there. Raises InvalidRequestError for another text than seconds."""
    text = request.query.get(name)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not (isfinite(seconds) and 0 <= seconds <= MAX_SECONDS):
        raise InvalidRequestError(
            f"{name} is {text[:40]!r}; give seconds, at least 0, at most {MAX_SECONDS}", param=name
        )
    return seconds


def process_identity(num_restarts: int) -> dict[str, Any]:
    """Return pid, host name, seconds since the start of this process, and how often it was started again before."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "age_seconds": max(0.0, time.time() - psutil.Process().create_time()),
        "num_restarts": num_restarts,
    }


def facts_of(pid: int) -> dict[str, Any]:
    """Return a process's open file descriptors, threads and resident bytes; empty if it has ended."""
    try:
        process = psutil.Process(pid)
        return {
            "pid": pid,
            "num_open_fds": process.num_fds(),
            "num_threads": process.num_threads(),
            "rss_bytes": process.memory_info().rss,
        }
    except psutil.NoSuchProcess:
        return {}


def health_response(missing: str | None, degraded: str | None = None) -> web.Response:
    """Return 200 if nothing is missing, else 503 with the reason. degraded: why it serves worse than it should."""
    if missing:
        return web.json_response({"status": "unavailable", "reason": missing}, status=503)
    return web.json_response({"status": "degraded", "reason": degraded} if degraded else {"status": "ok"})
