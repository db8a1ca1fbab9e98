"""The web application of the OpenAI API."""

from aiohttp import web

from router.http.access import Cors, key_check
from router.http.boundary import boundary
from router.http.endpoints import Endpoints
from router.settings import RouterSettings
from serving.api_keys import ApiKeys


def build_app(endpoints: Endpoints, settings: RouterSettings, keys: ApiKeys) -> web.Application:
    """An application that serves ``endpoints``. Start it with ``serving.http_server.start_http``."""
    cors = Cors(settings.origins)
    check = key_check(keys, metrics_need_key=settings.metrics_need_key)
    app = web.Application(
        middlewares=[cors.middleware, boundary, check], client_max_size=settings.max_body_bytes
    )
    app.on_response_prepare.append(cors.mark)
    app.add_routes(endpoints.routes())
    return app
