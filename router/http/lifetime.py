"""The lifetime of a request: resources that are released when it ends, and its end when the router stops."""

from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from aiohttp import web
from aiohttp.typedefs import Middleware

from router.cancellation import CancellableRequests

_HELD = web.RequestKey("held", ExitStack)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def lifetime(running: CancellableRequests) -> Middleware:
    """Return a middleware by which ``running`` can end every request, whatever it waits for, when the router stops.

    Place it inside the boundary, which answers with the reason.
    """

    @web.middleware
    async def live(request: web.Request, handler: _Handler) -> web.StreamResponse:
        with ExitStack() as held:
            request[_HELD] = held
            async with running.open(""):
                return await handler(request)

    return live


def held_by(request: web.Request) -> ExitStack:
    """Return the stack of resources that is unwound when the request has been answered."""
    return request[_HELD]
