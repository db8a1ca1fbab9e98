"""Access to the HTTP API: API keys, and the origins of web pages (CORS)."""

from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from contract.errors import UnauthenticatedError
from serving.admin_access import authorization_of
from serving.api_keys import ApiKeys, WrongKeys
from serving.http_hosts import HostCheck

_OPEN_PATHS = frozenset({"/", "/docs", "/health", "/ping", "/ready", "/version"})
_METRICS = "/metrics"
_PREFLIGHT_SECONDS = "600"
_EXPOSED = "Retry-After, Server-Timing, X-Request-Id, x-kvbaton-request-id"
TENANT = web.RequestKey("tenant", str)
"""The digest of the client's API key, noted by ``key_check``; "" if no key is required."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Check = Callable[[web.Request], None]
"""Raises an error for a request that is rejected."""


def checking(*checks: Check) -> Middleware:
    """Return one middleware for all checks. It is no coroutine, which would be resumed at each step of the handler."""

    @web.middleware
    def check_all(request: web.Request, handler: _Handler) -> Awaitable[web.StreamResponse]:
        for check in checks:
            check(request)
        return handler(request)

    return check_all


def key_check(keys: ApiKeys, wrong: WrongKeys, *, metrics_need_key: bool) -> Check:
    """Return a check that requires an API key except on open paths. It counts and raises UnauthenticatedError."""
    # platforms ask for the health without a key, and browsers for the page with links
    open_paths = _OPEN_PATHS if metrics_need_key else _OPEN_PATHS | {_METRICS}

    def check(request: web.Request) -> None:
        tenant = ""
        if keys.are_required and request.path not in open_paths:
            authorization = authorization_of(request)
            try:
                keys.check(authorization)
            except UnauthenticatedError:
                wrong.note(request.remote or "a disconnected client")
                raise
            tenant = keys.tenant(authorization)
        request[TENANT] = tenant

    return check


def tenant_of(request: web.Request) -> str:
    """Return the digest of the API key that ``key_check`` accepted; "" if no key is required."""
    return request[TENANT]


class Cors:
    """The origins whose web pages may call this API. origins: ``scheme://host[:port]``; "*" is every origin."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origins)

    def reject_forms(self, hosts: HostCheck) -> Check:
        """Return a check that rejects bodies of other sites' pages that are not JSON. For ports without API keys.

        A browser lets any page send forms without a preflight and only keeps the answer from it.
        """

        def check(request: web.Request) -> None:
            is_form = request.method == hdrs.METH_POST and request.content_type != "application/json"
            if is_form and not self._allowed(request) and not hosts.is_same_site(request):
                raise web.HTTPForbidden(reason="a page of another site may not send this; see cors_origins")

        return check

    @property
    def middleware(self) -> Middleware:
        """A middleware that answers preflight requests. It must be the outermost: a preflight carries no key."""

        @web.middleware
        def answer(request: web.Request, handler: _Handler) -> Awaitable[web.StreamResponse]:
            is_preflight = (
                request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
            )
            return answer_preflight(request) if is_preflight and self._allowed(request) else handler(request)

        async def answer_preflight(request: web.Request) -> web.StreamResponse:
            # whatever headers the page asks for: access depends on the key in one of them, and not on their names
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
        """Add the CORS headers to a response. For ``on_response_prepare``, which errors and streams pass too.

        Only for a port that lists origins.
        """
        # to every page, also one that is not allowed: a cache must not give one origin's answer to another
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if allowed := self._allowed(request):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = allowed
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED

    def _allowed(self, request: web.Request) -> str | None:
        origin = request.headers.get(hdrs.ORIGIN)
        if "*" in self._origins:
            return "*" if origin else None
        return origin if origin in self._origins else None
