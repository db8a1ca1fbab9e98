"""Access to the actions of an admin port: admin keys, or without them the user that the process runs as.

Other users of a machine can connect to its loopback addresses. Without keys they are distinguished from operators by the
kernel: ``/proc/net/tcp`` names the user of the socket at the other end of a connection.
"""

import ipaddress
import os
import sys
from pathlib import Path

from aiohttp import hdrs, web
from pydantic import Field

from contract.errors import UnauthenticatedError
from contract.options import Options
from serving.api_keys import ADMIN_KEYS, ApiKeys, WrongKeys

SAFE_METHODS = frozenset({hdrs.METH_GET, hdrs.METH_HEAD})
"""Methods of requests that change nothing (RFC 9110, section 9.2.1)."""
_API_KEY = "x-api-key"
_SHOWN_CHARACTERS = 8
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class AdminKeyOptions(Options):
    """The keys of operators."""

    admin_keys: str | None = Field(default=None, repr=False)
    """Keys of operators for the actions of the admin port, separated by commas; prefer the file. Not accepted as a
    flag. If unset, only root and the user of this process may use them, from this machine, and no one those of a router with
    API keys."""
    admin_keys_file: Path | None = None
    """File with admin keys, one per line; # begins a comment. It is read again when it changes."""


def authorization_of(request: web.Request) -> str:
    """Return the credentials of a request in the form of ``Authorization``, or "".

    A key in ``x-api-key``, where Anthropic's clients send it, counts unless ``Authorization`` holds a key too. It may hold
    something else: a proxy's Basic credentials, for example.
    """
    given = request.headers.get(hdrs.AUTHORIZATION, "")
    key = request.headers.get(_API_KEY)
    scheme, _, token = given.partition(" ")
    is_key = scheme.lower() == "bearer" and token.strip()
    return f"Bearer {key}" if key and not is_key else given


class AdminAccess:
    """Decides who may use the actions of one admin port. Raises SettingError for keys that cannot be used.

    why_closed: without admin keys no one may use them, for this reason. wrong_keys: counts wrong keys. users: ids of
    the users of this machine that need no key if there is none; None: root and the user of this process.
    """

    def __init__(
        self,
        options: AdminKeyOptions,
        *,
        why_closed: str | None = None,
        wrong_keys: WrongKeys | None = None,
        users: frozenset[int] | None = None,
    ) -> None:
        self._keys = ApiKeys(options.admin_keys, options.admin_keys_file, ADMIN_KEYS)
        self._why_closed = why_closed
        self._wrong = wrong_keys or WrongKeys()
        self._users = frozenset({0, os.geteuid()}) if users is None else users

    def check(self, request: web.Request) -> None:
        """Raise UnauthenticatedError, or HTTPForbidden if no key can help. Reading needs no user of this machine."""
        if self._keys.are_required:
            try:
                self._keys.check(authorization_of(request))
            except UnauthenticatedError:
                self._wrong.note(request.remote or "a disconnected client")
                raise
        elif self._why_closed:
            raise web.HTTPForbidden(reason=f"{self._why_closed}; set admin_keys_file")
        elif request.method not in SAFE_METHODS and local_user(request) not in self._users:
            raise web.HTTPForbidden(
                reason="without admin keys only the user of this process and root may do this, from this machine;"
                " set admin_keys_file"
            )

    def requester(self, request: web.Request) -> str:
        """Return who sends a request that was accepted, for the log: the address, and the key's digest or the user."""
        if self._keys.are_required:
            digest = self._keys.tenant(authorization_of(request))
            return f"{request.remote} with admin key {digest[:_SHOWN_CHARACTERS]}"
        user = local_user(request)
        return f"{request.remote}" if user is None else f"{request.remote} (user {user})"


def local_user(request: web.Request) -> int | None:
    """Return the id of the user whose process sends a request from this machine; None if that is not known.

    It is not known for another machine, and on systems without ``/proc/net/tcp``.
    """
    if request.transport is None:
        return None
    client = request.transport.get_extra_info("peername")
    server = request.transport.get_extra_info("sockname")
    try:
        ends = _end(client[0], client[1]), _end(server[0], server[1])
    except (ValueError, TypeError, IndexError):
        return None  # a Unix socket, or a connection that has just been closed
    table = Path("/proc/net/tcp6" if ends[0][0].version == 6 else "/proc/net/tcp")
    try:
        return socket_owner(table.read_text(), *ends)
    except OSError:
        return None


def _end(host: str, port: int) -> tuple[IPAddress, int]:
    """Return one end of a connection; an IPv4 address that an IPv6 socket shows is one of IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address, port


def socket_owner(table: str, client: tuple[IPAddress, int], server: tuple[IPAddress, int]) -> int | None:
    """Return the user of the client's socket, by the kernel's table of sockets.

    A socket without an inode is skipped: its process has closed it, and the kernel then shows root as its user.
    """
    ends = [_shown(*client), _shown(*server)]
    for line in table.splitlines()[1:]:
        fields = line.split()
        if fields[1:3] == ends and fields[9] != "0":
            return int(fields[7])
    return None


def _shown(address: IPAddress, port: int) -> str:
    """Return an end as the kernel prints it: words of 32 bits in the machine's byte order."""
    packed = address.packed
    words = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
