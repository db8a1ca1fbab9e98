"""The admin port of a process: ``/health``, ``/ready``, ``/metrics``, ``/debug/state``; plain HTTP, no API key.

A process may add routes, which check the access themselves.
"""

import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiohttp import web
from prometheus_client.registry import Collector

from serving.health import health_response
from serving.http_hosts import HostCheck
from serving.http_server import HttpServer, start_http
from serving.metrics import CONTENT_TYPE, render
from serving.process_facts import process_facts


class AdminServer:
    """Serves the pages on ``address`` between ``start`` and ``stop``.

    missing: returns what the process lacks to do its work, or None; shown by ``/health`` and ``/ready``. not_ready: returns
    another reason why it accepts no new work; shown by ``/ready`` only. state: returns plain data for ``/debug/state``, to
    which the process's own facts are added as ``process``. metrics: returns a collector of the current values; None: no
    such page. allowed_hosts: valid names in the Host header beside localhost. routes: further paths.
    """

    def __init__(
        self,
        address: str,
        *,
        missing: Callable[[], str | None],
        not_ready: Callable[[], str | None] = lambda: None,
        state: Callable[[], Awaitable[dict[str, Any]]],
        metrics: Callable[[], Awaitable[Collector]] | None = None,
        allowed_hosts: tuple[str, ...] = (),
        routes: Iterable[web.RouteDef] = (),
    ) -> None:
        self._asked_address = address
        self._missing = missing
        self._not_ready = not_ready
        self._state = state
        self._metrics = metrics
        self._routes = tuple(routes)
        self._hosts = HostCheck(address, allowed_hosts, refuses_origins=True)
        self._server: HttpServer | None = None

    @property
    def address(self) -> str:
        """The actual "host:port" while it listens, else the configured one."""
        return self._server.address if self._server else self._asked_address

    async def start(self) -> None:
        """Start to listen. Raises SettingError when the address cannot be bound."""
        app = web.Application(middlewares=[self._hosts.middleware])
        app.router.add_get("/health", self._get_health)
        app.router.add_get("/ready", self._get_ready)
        if self._metrics:
            app.router.add_get("/metrics", self._metrics_page(self._metrics))
        app.router.add_get("/debug/state", self._get_state)
        app.router.add_routes(self._routes)
        self._server = await start_http(app, self._asked_address, param="admin", shutdown_timeout_seconds=1.0)

    async def stop(self) -> None:
        """Stop listening; do nothing when it does not listen."""
        if self._server:
            server = self._server
            self._server = None
            await server.close()

    async def _get_health(self, _: web.Request) -> web.Response:
        return health_response(self._missing())

    async def _get_ready(self, _: web.Request) -> web.Response:
        return health_response(self._not_ready() or self._missing())

    async def _get_state(self, _: web.Request) -> web.Response:
        state = {**await self._state(), "process": process_facts()}
        return web.json_response(state, dumps=lambda data: json.dumps(data, default=str))

    def _metrics_page(
        self, metrics: Callable[[], Awaitable[Collector]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def get_metrics(_: web.Request) -> web.Response:
            return web.Response(body=render(await metrics()), headers={"Content-Type": CONTENT_TYPE})

        return get_metrics
