"""The addresses at which a worker's routers can be reached; a name may stand for several of them, which change."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from contract.addresses import join_address, split_address

logger = logging.getLogger(__name__)


LookUp = Callable[[str, int], Awaitable[frozenset[str]]]
"""Returns the addresses "IP:PORT" of a host name and a port. Raises OSError."""


async def look_up(host: str, port: int) -> frozenset[str]:
    """Ask the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return frozenset(join_address(str(address[0]), port) for *_, address in found)


class RouterAddresses:
    """Resolves the names of the setting ``router``, each HOST:PORT, as often as it is asked to."""

    def __init__(self, names: Sequence[str], look_up: LookUp = look_up) -> None:
        self._look_up = look_up
        self._known: dict[str, frozenset[str]] = {name: frozenset() for name in names}
        self._failures: dict[str, str] = {}

    async def resolve(self) -> frozenset[str]:
        """Return the addresses of all names, "IP:PORT". A name that cannot be resolved now keeps those that it had."""
        for name in self._known:
            try:
                self._known[name] = await self._resolved(name)
            except OSError as error:
                self._log_failure(name, error.strerror or str(error))
            else:
                self._failures.pop(name, None)
        return frozenset().union(*self._known.values())

    async def _resolved(self, name: str) -> frozenset[str]:
        host, port = split_address(name)
        return frozenset({name}) if _is_ip(host) else await self._look_up(host, port)

    def _log_failure(self, name: str, reason: str) -> None:
        if self._failures.get(name) != reason:
            self._failures[name] = reason
            logger.warning("the name of router %s cannot be resolved (%s)", name, reason)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
