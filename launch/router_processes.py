"""The routers that ``up`` starts: one, or several that share the ports for clients or have ports of their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contract.addresses import join_address, split_address
from launch.settings import LocalSettings
from launch.spec import Facts

ROUTER = "router"
"""The name of the first router; the others are router-1, router-2, ..."""
LOOPBACK = "127.0.0.1:0"
_FOR_CLIENTS = ("http", "grpc")
_ADDRESSES = (*_FOR_CLIENTS, "internal", "admin")


def router_names(settings: LocalSettings) -> tuple[str, ...]:
    """Return the names of all routers, the first one first."""
    return (ROUTER, *(f"{ROUTER}-{number}" for number in range(1, settings.num_routers)))


@dataclass(frozen=True)
class RouterPorts:
    """Decides the addresses of each router. given: addresses that the settings file has for routers."""

    settings: LocalSettings
    given: Mapping[str, Any]

    def of(self, name: str, known: Mapping[str, Facts]) -> dict[str, str]:
        """Return the flags for a router's addresses. One that was ready before keeps its own.

        Routers with ports of their own count up from the first one's; a port 0 stays 0. The ports for clients may be shared:
        the first router chooses them then.
        """
        if name in known:
            return {kind: known[name][kind] for kind in _ADDRESSES}
        own = {
            "http": self.settings.http,
            "grpc": self.settings.grpc,
            "internal": LOOPBACK,
            "admin": LOOPBACK,
        }
        if name == ROUTER:
            return {kind: address for kind, address in own.items() if kind not in self.given}
        number = int(name.removeprefix(f"{ROUTER}-"))
        found = {kind: _counted_up(self.given.get(kind, address), number) for kind, address in own.items()}
        if self.settings.shares_ports:
            found |= {kind: known[ROUTER][kind] for kind in _FOR_CLIENTS}
        return found


def _counted_up(address: str, number: int) -> str:
    host, port = split_address(address)
    return join_address(host, port + number if port else 0)
