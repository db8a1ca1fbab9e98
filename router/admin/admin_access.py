"""Access to the admin API of a router."""

from collections.abc import Awaitable, Callable

from aiohttp import web

from contract.addresses import is_loopback
from router.client_access import ClientAccess
from router.http.boundary import boundary
from router.settings import RouterSettings
from serving.admin_access import AdminAccess

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def admin_access(settings: RouterSettings, clients: ClientAccess) -> AdminAccess:
    """Return the access to this router's actions. A client's API key is never enough: operators can stop workers.

    Without admin keys it is closed to all if clients need API keys, or if other machines can reach the port.
    Raises SettingError.
    """
    why_closed = None
    if clients.keys.are_required:
        why_closed = "this router has API keys, so operators need a key too"
    elif not is_loopback(settings.admin):
        why_closed = "other machines can reach this port, so operators need a key"
    return AdminAccess(settings, why_closed=why_closed, wrong_keys=clients.wrong_keys)


def answering(handler: _Handler) -> _Handler:
    """Return a handler that answers errors as the public API does."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await boundary(request, handler)

    return handle
