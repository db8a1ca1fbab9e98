"""/health, /ready, /version, /metrics and /openapi.json: the service about itself."""

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client.registry import Collector

from router.attempts.draining import Drain
from router.http.bodies.body import Json
from serving.health import health_response
from serving.metrics import CONTENT_TYPE, MetricsPage

_METRICS_SECONDS = 1.0
"""The age of a page that is sent again. A page takes milliseconds of the event loop, and anyone may read it without keys."""


class StatusEndpoints:
    """Reports the state of the router. missing: describes what requests lack. collector: returns the metrics of this moment.

    document: of OpenAPI.
    """

    def __init__(
        self,
        missing: Callable[[], str | None],
        degraded: Callable[[], str | None],
        drain: Drain,
        collector: Callable[[], Awaitable[Collector]],
        document: Json,
    ) -> None:
        self._missing = missing
        self._degraded = degraded
        self._drain = drain
        self._metrics = MetricsPage(collector, _METRICS_SECONDS)
        self._document = document
        self._version = str(document["info"]["version"])

    def routes(self) -> list[web.RouteDef]:
        """Return all five paths."""
        return [
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/version", self.version),
            web.get("/metrics", self.metrics),
            web.get("/openapi.json", self.openapi),
        ]

    async def health(self, _: web.Request) -> web.Response:
        """GET /health: 200 if requests can be answered, else 503 and what is missing; ``degraded`` if they cost too much."""
        return health_response(self._missing(), self._degraded())

    async def ready(self, _: web.Request) -> web.Response:
        """GET /ready: like /health, but also 503 as soon as the router drains."""
        return health_response(self._drain.reason or self._missing())

    async def version(self, _: web.Request) -> web.Response:
        """GET /version."""
        return web.json_response({"version": self._version})

    async def metrics(self, _: web.Request) -> web.Response:
        """GET /metrics: those of this moment, or of up to a second ago."""
        return web.Response(body=await self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def openapi(self, _: web.Request) -> web.Response:
        """GET /openapi.json."""
        return web.json_response(self._document)
