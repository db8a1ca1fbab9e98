"""The interface of what starts and removes workers."""

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
