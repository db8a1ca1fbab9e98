"""Checks Host and Origin headers, against web pages that rebind their own name to 127.0.0.1."""

import ipaddress
import socket
from collections.abc import Awaitable, Callable
from functools import lru_cache
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from contract.addresses import is_loopback, split_address, unix_path
from contract.options import Options

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class HostNameOptions(Options):
    """The names by which HTTP clients may call a process."""

    allowed_hosts: str | None = None
    """Host names, separated by commas, that HTTP clients may use for this process besides localhost and the machine's own
    name; * allows any. If unset, a port on a loopback address rejects all others, since a web page can point its own name
    there; a port on another address rejects none."""


def listed_hosts(value: str | None) -> tuple[str, ...]:
    """Return the comma-separated names of a setting."""
    return tuple(part.strip().lower() for part in (value or "").split(",") if part.strip())


class HostCheck:
    """Checks the Host header. address: that of the server. configured: further valid names, "*" for any.

    No web page can reach a Unix socket by a name of its own: every name is valid there, unless some are configured.

    On a loopback address, its names, this machine's own name and the configured ones are valid. On another address every
    name is valid, unless some are configured: then those, the address itself and IP addresses are.
    """

    def __init__(
        self, address: str, configured: tuple[str, ...] = (), *, refuses_origins: bool = False
    ) -> None:
        is_unix = unix_path(address) is not None
        own = "localhost" if is_unix else split_address(address)[0].lower()
        # No web page of others has this machine's name: an attacker's page is served under a name of the attacker's.
        self._names = _LOOPBACK | {own, socket.gethostname().lower(), *configured}
        self._is_open = "*" in configured or (not configured and (is_unix or not is_loopback(address)))
        self._is_local = is_loopback(address)
        self._refuses_origins = refuses_origins

    @property
    def middleware(self) -> Middleware:
        """A middleware that answers 421 for a wrong host name, and 403 to pages of other sites if origins are refused."""

        @web.middleware
        async def check(request: web.Request, handler: _Handler) -> web.StreamResponse:
            self.check(request)
            return await handler(request)

        return check

    def check(self, request: web.Request) -> None:
        """Raise an HTTP error as ``middleware`` answers it."""
        if not self.admits(request.headers.get(hdrs.HOST)):
            raise web.HTTPMisdirectedRequest(
                reason="the Host header names another host; see the setting allowed_hosts"
            )
        if self._refuses_origins and not self.is_own_origin(request.headers.get(hdrs.ORIGIN)):
            raise web.HTTPForbidden(reason="web pages of other sites may not use this port")

    def admits(self, header: str | None) -> bool:
        """Return True if this Host header is valid. Browsers always send one."""
        if header is None or self._is_open:
            return True
        host = _host_of(header)
        return host in self._names or (not self._is_local and is_ip_address(host))

    def is_own_origin(self, origin: str | None) -> bool:
        """Return True if a request with this Origin header, or without one, is not from a page of another site."""
        return origin is None or _origin_host(origin) in self._names

    def is_same_site(self, request: web.Request) -> bool:
        """Return True if the request is not from a page, or from one served under the requested name."""
        origin = request.headers.get(hdrs.ORIGIN)
        if self.is_own_origin(origin):
            return True
        host = _host_of(request.headers.get(hdrs.HOST, ""))
        return host != "" and _origin_host(origin or "") == host


@lru_cache(64)
def _host_of(header: str) -> str:
    """Return the name of "name:port", without brackets, a trailing dot or a port."""
    try:
        parts = urlsplit(f"//{header}")
        host = parts.hostname or ""
        _ = parts.port
    except ValueError:
        return ""
    return "" if parts.path or parts.query or parts.username is not None else host.removesuffix(".")


def _origin_host(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""


def is_ip_address(host: str) -> bool:
    """Return whether a host is an address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
