"""The public HTTP port: its application, with middlewares around the routes, and its server."""

from collections.abc import Iterable

from aiohttp import hdrs, web

from router.attempts.draining import Drain
from router.client_access import ClientAccess
from router.http.access import Cors, checking, key_check
from router.http.bodies.json_bodies import check_expectation
from router.http.boundary import boundary
from router.settings import RouterSettings
from serving.http_hosts import HostCheck, listed_hosts
from serving.http_server import HttpServer, start_http


def build_app(
    routes: Iterable[web.RouteDef], settings: RouterSettings, clients: ClientAccess, drain: Drain
) -> web.Application:
    """Return an application that serves ``routes``. Start it with ``serving.http_server.start_http``.

    While ``drain`` is on, connections are closed after their answers.
    """
    cors = Cors(settings.origins)
    keys = key_check(clients.keys, clients.wrong_keys, metrics_need_key=settings.metrics_need_key)
    hosts = HostCheck(settings.http, listed_hosts(settings.allowed_hosts))
    # With API keys there is nothing to protect from forms: a page of another site cannot send a key.
    forms = [] if clients.keys.are_required else [cors.reject_forms(hosts)]
    app = web.Application(
        middlewares=[
            *([cors.middleware] if settings.origins else []),
            boundary(clients.running),
            checking(hosts.check, keys, *forms),
        ],
        client_max_size=settings.max_body_bytes,
    )
    if settings.origins:
        app.on_response_prepare.append(cors.mark)

    async def end_connection(_: web.Request, response: web.StreamResponse) -> None:
        if drain.is_on:
            response.force_close()
            response.headers[hdrs.CONNECTION] = "close"  # force_close comes too late for the header

    app.on_response_prepare.append(end_connection)
    # aiohttp would answer ``Expect: 100-continue`` before keys and sizes are checked; the reader of the body does it later
    app.add_routes(
        web.RouteDef(
            route.method, route.path, route.handler, {**route.kwargs, "expect_handler": check_expectation}
        )
        for route in routes
    )
    return app


_STOP_GRACE_SECONDS = 1.0


class HttpPort:
    """Owns the HTTP server between ``start`` and ``close``."""

    def __init__(self, app: web.Application, settings: RouterSettings, clients: ClientAccess) -> None:
        self._app = app
        self._settings = settings
        self._clients = clients
        self._server: HttpServer | None = None

    @property
    def num_answering(self) -> int:
        """Requests that are being answered."""
        return len(self._server.connections.answering) if self._server else 0

    async def start(self, max_connections: int) -> str:
        """Listen, and return the real "host:port". Raises SettingError."""
        tls = self._clients.tls
        self._server = await start_http(
            self._app,
            self._settings.http,
            shutdown_timeout_seconds=_STOP_GRACE_SECONDS,
            tls=tls.context if tls else None,
            limits=self._settings.http_limits(max_connections),
            is_shared=self._settings.reuse_port,
            root_path=self._settings.root_path or "",
            penalties=self._clients.penalties,
        )
        return self._server.address

    def stop_listening(self) -> None:
        """Accept no further connection; open ones continue. Does nothing before ``start``."""
        if self._server:
            self._server.stop_listening()

    async def wait_answered(self) -> None:
        """Block until no request is being answered."""
        if self._server:
            await self._server.until_answered()

    async def close(self) -> None:
        """Stop listening and end open connections. Does nothing before ``start``."""
        if self._server:
            await self._server.close()
