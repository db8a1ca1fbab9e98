"""The public HTTP port."""

from aiohttp import web

from router.client_access import ClientAccess
from router.settings import RouterSettings
from serving.http_server import HttpServer, start_http

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
        return self._server.connections.num_answering if self._server else 0

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
