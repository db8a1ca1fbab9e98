"""The addresses at which a worker's routers can be reached; a name may stand for several of them, which change."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Sequence

from serving.settings import split_address

logger = logging.getLogger(__name__)


class RouterAddresses:
    """Resolves the names of the setting ``router``, each HOST:PORT, as often as it is asked to."""

    def __init__(self, names: Sequence[str]) -> None:
        self._known: dict[str, frozenset[str]] = {name: frozenset() for name in names}
        self._failures: dict[str, str] = {}

    async def resolve(self) -> frozenset[str]:
        """Return the addresses of all names, "IP:PORT". A name that cannot be resolved now keeps those that it had."""
        for name in self._known:
            try:
                self._known[name] = await _resolved(name)
            except OSError as error:
                self._log_failure(name, error.strerror or str(error))
            else:
                self._failures.pop(name, None)
        return frozenset().union(*self._known.values())

    def _log_failure(self, name: str, reason: str) -> None:
        if self._failures.get(name) != reason:
            self._failures[name] = reason
            logger.warning("the name of router %s cannot be resolved (%s)", name, reason)


async def _resolved(name: str) -> frozenset[str]:
    """Return the addresses of one HOST:PORT. Raises OSError."""
    host, port = split_address(name)
    if _is_ip(host):
        return frozenset({name})
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return frozenset(
        f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
        for family, _, _, _, address in found
    )


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
