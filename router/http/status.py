"""The service about itself: its models, its health, its metrics, its version, its paths, and pages for browsers."""

from collections.abc import Awaitable, Callable
from html import escape

from aiohttp import hdrs, web
from prometheus_client.registry import Collector

from contract.errors import NotFoundError
from router.attempts.draining import Drain
from router.http.bodies.body import Json
from router.request_path import RequestPath
from serving.admin import health_response
from serving.metrics import CONTENT_TYPE, MetricsPage

_LINKS = {
    "/docs": "every path",
    "/openapi.json": "the same for programs (OpenAPI 3.1)",
    "/v1/models": "the served model",
    "/health": "whether requests can be answered now",
    "/metrics": "metrics for Prometheus",
    "/version": "the version",
}
_STYLE = "body{font:16px/1.5 system-ui,sans-serif;max-width:50em;margin:3em auto;padding:0 1em}td{padding:.2em 1em .2em 0}"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
}
# A page of metrics takes milliseconds of the event loop, and with metrics_need_key off anyone may read it.
_METRICS_SECONDS = 1.0
"""The age of a page of metrics that is sent again."""


class StatusEndpoints:
    """Reports the state of the router. The pages are static and load nothing from elsewhere.

    collector: returns the metrics of this moment. document: of OpenAPI.
    """

    def __init__(
        self,
        path: RequestPath,
        drain: Drain,
        collector: Callable[[], Awaitable[Collector]],
        document: Json,
    ) -> None:
        self._path = path
        self._drain = drain
        self._metrics = MetricsPage(collector, _METRICS_SECONDS)
        self._document = document
        self._version = str(document["info"]["version"])
        # links are relative, for a service below a path of a reverse proxy
        links = [(f'<a href="{path.removeprefix("/")}">{path}</a>', text) for path, text in _LINKS.items()]
        self._home = _page(f"kvbaton {self._version}", links)
        self._docs = _page(
            "Paths",
            [
                (f"<code>{method.upper()} {escape(path)}</code>", operation["summary"])
                for path, operations in document["paths"].items()
                for method, operation in operations.items()
            ],
        )

    def routes(self) -> list[web.RouteDef]:
        """Return all paths."""
        return [
            web.get("/", self.home),
            web.get("/docs", self.docs),
            web.get("/ping", self.ping),
            web.get("/load", self.load),
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/version", self.version),
            web.get("/metrics", self.metrics),
            web.get("/openapi.json", self.openapi),
            web.get("/v1/models", self.list_models),
            web.get("/v1/models/{model:.+}", self.show_model),
        ]

    async def home(self, request: web.Request) -> web.Response:
        """GET /: a page with links for browsers, and JSON for others."""
        if "text/html" in request.headers.get(hdrs.ACCEPT, ""):
            return _html(self._home)
        return web.json_response({"name": "kvbaton", "version": self._version, "paths": list(_LINKS)})

    async def docs(self, _: web.Request) -> web.Response:
        """GET /docs: a page with every path."""
        return _html(self._docs)

    async def ping(self, _: web.Request) -> web.Response:
        """GET /ping: like /health; some platforms ask here."""
        return health_response(self._path.missing)

    async def load(self, _: web.Request) -> web.Response:
        """GET /load: the requests that wait or are being answered, as vLLM reports them."""
        return web.json_response({"server_load": self._path.tracker.num_held})

    async def health(self, _: web.Request) -> web.Response:
        """GET /health: 200 if requests can be answered, else 503 and what is missing; ``degraded`` if they cost too much."""
        return health_response(self._path.missing, self._path.degraded)

    async def ready(self, _: web.Request) -> web.Response:
        """GET /ready: like /health, but also 503 as soon as the router drains."""
        return health_response(self._drain.reason or self._path.missing)

    async def version(self, _: web.Request) -> web.Response:
        """GET /version."""
        return web.json_response({"version": self._version})

    async def metrics(self, _: web.Request) -> web.Response:
        """GET /metrics: those of this moment, or of up to a second ago."""
        return web.Response(body=await self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def openapi(self, _: web.Request) -> web.Response:
        """GET /openapi.json."""
        return web.json_response(self._document)

    async def list_models(self, _: web.Request) -> web.Response:
        """GET /v1/models; empty while the model is not known yet."""
        models = self._path.models
        # an empty list and no error: tools ask for the models before the first worker is there
        data = [self._model(name) for name in models.names] if models.is_known else []
        return web.json_response({"object": "list", "data": data})

    async def show_model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{model}."""
        name = request.match_info["model"]
        models = self._path.models
        if not models.is_known or name not in models.names:
            raise NotFoundError(
                f"The model `{name[:100]}` does not exist.", param="model", code="model_not_found"
            )
        return web.json_response(self._model(name))

    def _model(self, name: str) -> Json:
        models = self._path.models
        registry = self._path.registry
        return {
            "id": name,
            "object": "model",
            "created": models.known_since,
            "owned_by": "kvbaton",
            "max_model_len": registry.max_model_len(models.card().max_model_len),
            "embeds_only": registry.embeds_only,
            # In the words of OpenRouter's list. A model that sees is served as a model of text, too.
            "architecture": {
                "input_modalities": ["text"],
                "output_modalities": ["embeddings" if registry.embeds_only else "text"],
            },
        }


def _html(page: str) -> web.Response:
    return web.Response(text=page, content_type="text/html", headers=_HEADERS)


def _page(title: str, rows: list[tuple[str, str]]) -> str:
    """Return a page with a table. The first cells are HTML."""
    body = "".join(f"<tr><td>{first}</td><td>{escape(text)}</td></tr>" for first, text in rows)
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f"{head}<h1>{escape(title)}</h1><table>{body}</table></html>"
