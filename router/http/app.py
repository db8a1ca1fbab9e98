"""The web application of the OpenAI API."""

from aiohttp import hdrs, web

from router.cancellation import CancellableRequests
from router.draining import Drain
from router.http.access import Cors, key_check
from router.http.boundary import boundary
from router.http.endpoints import Endpoints
from router.http.lifetime import lifetime
from router.settings import RouterSettings
from serving.api_keys import ApiKeys
from serving.http_hosts import HostCheck, listed_hosts
from serving.wrong_keys import WrongKeys


def build_app(
    endpoints: Endpoints,
    settings: RouterSettings,
    keys: ApiKeys,
    wrong: WrongKeys,
    running: CancellableRequests,
    drain: Drain,
) -> web.Application:
    """An application that serves ``endpoints``. Start it with ``serving.http_server.start_http``.

    running: what a drain ends. While ``drain`` is on, connections are closed behind their answers.
    """
    cors = Cors(settings.origins)
    check = key_check(keys, wrong, metrics_need_key=settings.metrics_need_key)
    hosts = HostCheck(settings.http, listed_hosts(settings.allowed_hosts))
    forms = [] if keys.are_required else [cors.refuse_forms(hosts)]  # a key is nothing that a page can send
    app = web.Application(
        middlewares=[cors.middleware, boundary, hosts.middleware, check, *forms, lifetime(running)],
        client_max_size=settings.max_body_bytes,
    )
    app.on_response_prepare.append(cors.mark)

    async def end_connection(_: web.Request, response: web.StreamResponse) -> None:
        if drain.is_on:
            response.force_close()
            response.headers[hdrs.CONNECTION] = "close"  # its headers were made before

    app.on_response_prepare.append(end_connection)
    app.add_routes(endpoints.routes())
    return app
