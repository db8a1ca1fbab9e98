"""The addresses at which a worker's routers can be reached; a name may stand for several of them, which change."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from contract.addresses import join_address, split_address
from serving.http_hosts import is_ip_address

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
                host, port = split_address(name)
                found = frozenset({name}) if is_ip_address(host) else await self._look_up(host, port)
            except OSError as error:
                reason = error.strerror or str(error)
                # Once for each reason: this is asked every two seconds.
                if self._failures.get(name) != reason:
                    self._failures[name] = reason
                    logger.warning("the name of router %s cannot be resolved (%s)", name, reason)
            else:
                self._known[name] = found
                self._failures.pop(name, None)
        return frozenset().union(*self._known.values())
