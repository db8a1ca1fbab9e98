"""What ends with a request: what it holds, and its place among those that a router which stops has to end."""

from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from aiohttp import web
from aiohttp.typedefs import Middleware

from router.cancellation import CancellableRequests

_HELD = web.RequestKey("held", ExitStack)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def lifetime(running: CancellableRequests) -> Middleware:
    """Makes every request one that ``running`` ends when the router stops, whatever it waits for.

    Place it within the boundary, which tells the client why the request has ended.
    """

    @web.middleware
    async def live(request: web.Request, handler: _Handler) -> web.StreamResponse:
        with ExitStack() as held:
            request[_HELD] = held
            async with running.open(""):
                return await handler(request)

    return live


def held_by(request: web.Request) -> ExitStack:
    """Return what is left when the request has been answered."""
    return request[_HELD]
