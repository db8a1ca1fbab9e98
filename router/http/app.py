"""The web application of the public HTTP API: its middlewares around its routes."""

from collections.abc import Iterable

from aiohttp import hdrs, web

from router.attempts.draining import Drain
from router.client_access import ClientAccess
from router.http.access import Cors, checking, key_check
from router.http.bodies.raw_body import check_expectation
from router.http.boundary import boundary
from router.http.lifetime import lifetime
from router.settings import RouterSettings
from serving.http_hosts import HostCheck, listed_hosts


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
            cors.middleware,
            boundary,
            checking(hosts.check, keys, *forms),
            lifetime(clients.running),
        ],
        client_max_size=settings.max_body_bytes,
    )
    app.on_response_prepare.append(cors.mark)

    async def end_connection(_: web.Request, response: web.StreamResponse) -> None:
        if drain.is_on:
            response.force_close()
            response.headers[hdrs.CONNECTION] = "close"  # force_close comes too late for the header

    app.on_response_prepare.append(end_connection)
    app.add_routes(_continued_later(route) for route in routes)
    return app


def _continued_later(route: web.RouteDef) -> web.RouteDef:
    """Return the route without an answer to ``Expect: 100-continue`` before keys and sizes are checked.

    The reader of the body sends it (``router.http.bodies.raw_body``).
    """
    return web.RouteDef(
        route.method, route.path, route.handler, {**route.kwargs, "expect_handler": check_expectation}
    )
