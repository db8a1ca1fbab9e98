"""The workers that leave: drained by this autoscaler, or being removed by its launcher."""

import asyncio
import logging

from autoscaler.launcher import Launcher
from contract.errors import KvbatonError

logger = logging.getLogger(__name__)


class Departures:
    """Owns the removals that run. draining: the workers that this autoscaler has drained, until they are removed."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._removals: dict[asyncio.Task[None], str] = {}
        self.draining: set[str] = set()

    @property
    def leaving(self) -> set[str]:
        """The workers that are being removed."""
        return set(self._removals.values())

    @property
    def keepable(self) -> set[str]:
        """The drained workers that may serve again."""
        return self.draining - self.leaving

    def remove(self, name: str) -> None:
        """Begin to remove a worker. If that fails, it counts as drained, so that it is tried again."""
        task = asyncio.create_task(self._removed(name), name=f"remove {name}")
        self._removals[task] = name
        task.add_done_callback(self._removals.pop)

    async def wait(self) -> None:
        """Wait until the workers that are being removed have ended."""
        await asyncio.gather(*self._removals)

    async def _removed(self, name: str) -> None:
        try:
            await self._launcher.remove(name)
        except KvbatonError as error:
            logger.warning("worker %s is not removed: %s", name, error.message)
            self.draining.add(name)
