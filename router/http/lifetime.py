"""The lifetime of a request: resources that are released when it ends, and its end when the router stops."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

from aiohttp import web
from aiohttp.typedefs import Middleware

from router.http.boundary import REQUEST_ID, name_of
from router.intake.cancellation import CancellableRequests, OpenRequest
from serving.admin_access import authorization_of

_OPEN = web.RequestKey("open", OpenRequest)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def lifetime(running: CancellableRequests) -> Middleware:
    """Return a middleware by which ``running`` can end every request, whatever it waits for, when the router stops.

    Place it inside the boundary, which answers with the reason.
    """

    @web.middleware
    async def live(request: web.Request, handler: _Handler) -> web.StreamResponse:
        with running.open() as request[_OPEN]:
            return await handler(request)

    return live


def let_client_cancel(request: web.Request) -> None:
    """Let the client cancel the request from now on, by its id or by the client's own name for it."""
    request[_OPEN].add_names(authorization_of(request), request[REQUEST_ID], name_of(request))


def hold_until_end(request: web.Request, resource: AbstractContextManager[object]) -> None:
    """Enter the context of a resource, and leave it when the request has been answered."""
    request[_OPEN].hold(resource)
