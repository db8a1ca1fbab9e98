"""Access to the admin API of a router."""

from collections.abc import Awaitable, Callable

from aiohttp import web

from contract.errors import UnauthenticatedError
from router.client_access import ClientAccess
from router.http.access import authorization_of
from router.http.boundary import boundary
from router.settings import RouterSettings
from serving.api_keys import ADMIN_KEYS, ApiKeys
from serving.settings import is_loopback

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AdminAccess:
    """Checks admin keys. Without them the API is open to this machine only, and closed if clients need API keys.

    A client's API key is never enough: operators can stop workers. Raises SettingError.
    """

    def __init__(self, settings: RouterSettings, clients: ClientAccess) -> None:
        self._keys = ApiKeys(settings.admin_keys, settings.admin_keys_file, ADMIN_KEYS)
        self._wrong = clients.wrong_keys
        self._why_closed: str | None = None
        if clients.keys.are_required:
            self._why_closed = "this router has API keys, so operators need a key too"
        elif not is_loopback(settings.admin):
            self._why_closed = "other machines can reach this port, so operators need a key"

    def guard(self, handler: _Handler) -> _Handler:
        """Return a handler that checks the access first, and answers errors as the public API does."""

        async def checked(request: web.Request) -> web.StreamResponse:
            self._check(request)
            return await handler(request)

        async def handle(request: web.Request) -> web.StreamResponse:
            return await boundary(request, checked)

        return handle

    def _check(self, request: web.Request) -> None:
        """Raise UnauthenticatedError, or HTTPForbidden if no key can help."""
        if self._keys.are_required:
            try:
                self._keys.check(authorization_of(request))
            except UnauthenticatedError:
                self._wrong.note(request.remote or "a disconnected client")
                raise
        elif self._why_closed:
            raise web.HTTPForbidden(reason=f"{self._why_closed}; set admin_keys_file")
