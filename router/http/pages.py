"""Pages for people who open the address in a browser, and paths that load balancers of other servers ask for."""

from collections.abc import Callable
from html import escape

from aiohttp import hdrs, web

from router.http.bodies.body import Json
from serving.health import health_response

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


class PageEndpoints:
    """``/``, ``/docs``, ``/ping`` and ``/load``. The pages are static and load nothing from elsewhere.

    missing: describes what requests lack. num_running: returns the number of requests that wait or are being answered.
    """

    def __init__(
        self, document: Json, missing: Callable[[], str | None], num_running: Callable[[], int]
    ) -> None:
        self._version = str(document["info"]["version"])
        self._missing = missing
        self._num_running = num_running
        self._home = _page(f"kvbaton {self._version}", [(_link(path), text) for path, text in _LINKS.items()])
        self._docs = _page(
            "Paths",
            [
                (f"<code>{method.upper()} {escape(path)}</code>", operation["summary"])
                for path, operations in document["paths"].items()
                for method, operation in operations.items()
            ],
        )

    def routes(self) -> list[web.RouteDef]:
        """Return all four paths."""
        return [
            web.get("/", self.home),
            web.get("/docs", self.docs),
            web.get("/ping", self.ping),
            web.get("/load", self.load),
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
        return health_response(self._missing())

    async def load(self, _: web.Request) -> web.Response:
        """GET /load: the requests that wait or are being answered, as vLLM reports them."""
        return web.json_response({"server_load": self._num_running()})


def _html(page: str) -> web.Response:
    return web.Response(text=page, content_type="text/html", headers=_HEADERS)


def _link(path: str) -> str:
    return f'<a href="{path.removeprefix("/")}">{path}</a>'


def _page(title: str, rows: list[tuple[str, str]]) -> str:
    """Return a page with a table. The first cells are HTML. Links are relative, for services below a path."""
    body = "".join(f"<tr><td>{first}</td><td>{escape(text)}</td></tr>" for first, text in rows)
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f"{head}<h1>{escape(title)}</h1><table>{body}</table></html>"
