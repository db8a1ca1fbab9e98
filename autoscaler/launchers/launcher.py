"""The interface of launchers, which start and remove workers.

The controller asks the launcher for the list of its workers before each decision, and carries out each order with one call.
Nothing else of it depends on where workers run::

    async with open_launcher("docker", settings) as launcher:
        name = await launcher.add(Role.DECODE)  # returns at once; the worker attaches to a router when it has started
        assert (name, Role.DECODE) in await launcher.names()
        ...  # the worker is drained through a router, and reports that it is empty
        await launcher.remove(name)

Workers drain by the routers' admin API, so a launcher has nothing to do with requests. It keeps no list of its own if the
place where workers run has one: an autoscaler that is started again finds its workers there.
"""

from collections.abc import Sequence
from typing import Protocol

from contract.identity import Role


class Launcher(Protocol):
    """Starts and removes workers. A worker's name is its id at the router. Each method raises KvbatonError if it cannot."""

    async def names(self) -> Sequence[tuple[str, Role]]:
        """Return the workers that it has started and can remove, with the roles in which they were started."""

    async def add(self, role: Role) -> str:
        """Begin to start a worker, and return its name."""

    async def remove(self, name: str) -> None:
        """Stop a worker, which drains first, and return when it has ended."""
