"""The launcher of workers as processes of this machine, which a supervisor keeps running."""

from collections.abc import Sequence

from contract.errors import UnavailableError
from contract.identity import Role
from launch.kept_process import ProcessSpec
from launch.supervisor import Supervisor


class LocalLauncher:
    """Starts processes of ``specs``, those of the largest pools. running: names of those that run already."""

    def __init__(self, supervisor: Supervisor, specs: Sequence[ProcessSpec], running: Sequence[str]) -> None:
        self._supervisor = supervisor
        self._specs = {spec.name: spec for spec in specs}
        self._running = set(running)

    async def names(self) -> Sequence[tuple[str, Role]]:
        """Return the workers that it has started and not removed."""
        return [(name, spec.role) for name, spec in self._specs.items() if name in self._running]

    async def add(self, role: Role) -> str:
        """Begin to start a worker. Raises UnavailableError if all of its role run, perhaps in another role."""
        for name, spec in self._specs.items():
            if spec.role is role and name not in self._running:
                self._supervisor.add(spec)
                self._running.add(name)
                return name
        raise UnavailableError(f"all {role.value} workers run already")

    async def remove(self, name: str) -> None:
        """Stop a worker and return when its process has ended."""
        self._running.discard(name)  # before it has ended: it is no worker that could be removed once more
        await self._supervisor.retire(name)
