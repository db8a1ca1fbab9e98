"""The web application of the OpenAI API."""

from aiohttp import web

from router.http.boundary import boundary
from router.http.endpoints import Endpoints
from router.settings import RouterSettings


def build_app(endpoints: Endpoints, settings: RouterSettings) -> web.Application:
    """An application that serves ``endpoints``. Start it with ``serving.http_server.start_http``."""
    app = web.Application(middlewares=[boundary], client_max_size=settings.max_body_bytes)
    app.add_routes(endpoints.routes())
    return app
