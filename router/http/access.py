"""Who may call: API keys, and the origins of web pages (CORS)."""

from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from contract.errors import UnauthenticatedError
from serving.api_keys import ApiKeys
from serving.http_hosts import HostCheck
from serving.wrong_keys import WrongKeys

_OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
_METRICS = "/metrics"
_API_KEY = "x-api-key"
_PREFLIGHT_SECONDS = "600"
_EXPOSED = "Retry-After, Server-Timing, X-Request-Id, x-kvbaton-request-id"
_TENANT = web.RequestKey("tenant", str)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def key_check(keys: ApiKeys, wrong: WrongKeys, *, metrics_need_key: bool) -> Middleware:
    """Lets requests for open paths through, and others with a key; counts and raises UnauthenticatedError."""
    open_paths = _OPEN_PATHS if metrics_need_key else _OPEN_PATHS | {_METRICS}

    @web.middleware
    async def check(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.path not in open_paths:
            try:
                keys.check(authorization_of(request))
            except UnauthenticatedError:
                wrong.note(request.remote or "a client that has gone")
                raise
            request[_TENANT] = keys.tenant(authorization_of(request))
        return await handler(request)

    return check


def authorization_of(request: web.Request) -> str:
    """Return what a request says of who asks, or "".

    A key in ``x-api-key``, as Anthropic's clients send it, counts where ``Authorization`` holds none: a proxy's Basic, say.
    """
    given = request.headers.get(hdrs.AUTHORIZATION, "")
    key = request.headers.get(_API_KEY)
    scheme, _, token = given.partition(" ")
    is_key = scheme.lower() == "bearer" and token.strip()
    return f"Bearer {key}" if key and not is_key else given


def tenant_of(request: web.Request) -> str:
    """Return the digest of the API key that ``key_check`` accepted; "" where no key is needed."""
    tenant: str = request.get(_TENANT, "")
    return tenant


class Cors:
    """Lets web pages of some origins call us. origins: ``scheme://host[:port]``; "*" is every one."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origins)

    def refuse_forms(self, hosts: HostCheck) -> Middleware:
        """Refuses what a page of any site can send without asking before: what is no JSON. For ports without API keys.

        A browser lets each page send forms, and keeps the answer from it only.
        """

        @web.middleware
        async def check(request: web.Request, handler: _Handler) -> web.StreamResponse:
            is_form = request.method == hdrs.METH_POST and request.content_type != "application/json"
            if is_form and not self._allowed(request) and not hosts.is_same_site(request):
                raise web.HTTPForbidden(reason="a page of another site may not send this; see cors_origins")
            return await handler(request)

        return check

    @property
    def middleware(self) -> Middleware:
        """Answers a browser's question before the request. Outermost, for such a question carries no key."""

        @web.middleware
        async def answer(request: web.Request, handler: _Handler) -> web.StreamResponse:
            is_preflight = (
                request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
            )
            if not is_preflight or not self._allowed(request):
                return await handler(request)
            asked_for = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, hdrs.AUTHORIZATION)
            return web.Response(
                status=204,
                headers={
                    hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST, DELETE",
                    hdrs.ACCESS_CONTROL_ALLOW_HEADERS: asked_for,
                    hdrs.ACCESS_CONTROL_MAX_AGE: _PREFLIGHT_SECONDS,
                },
            )

        return answer

    async def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Say in a response's headers who may read it; for ``on_response_prepare``: errors and streams pass there too."""
        if not self._origins:
            return
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if allowed := self._allowed(request):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = allowed
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED

    def _allowed(self, request: web.Request) -> str | None:
        origin = request.headers.get(hdrs.ORIGIN)
        if "*" in self._origins:
            return "*" if origin else None
        return origin if origin in self._origins else None
