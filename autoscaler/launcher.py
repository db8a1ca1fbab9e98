"""The interface of what starts and removes workers."""

from collections.abc import Sequence
from typing import Protocol

from contract.identity import Role


class Launcher(Protocol):
    """Starts and removes workers. A worker's name is its id at the router."""

    def names(self) -> Sequence[tuple[str, Role]]:
        """Return the workers that it has started and not removed, with the roles in which they were started."""

    def add(self, role: Role) -> str:
        """Begin to start a worker, and return its name. Raises KvbatonError if it cannot."""

    async def remove(self, name: str) -> None:
        """Stop a worker, which drains first, and return when it has ended. Raises KvbatonError if it cannot."""
