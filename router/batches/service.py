"""Everything about files and batches of one router, started and stopped in order."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from router.batches.answering import AnswerBody
from router.batches.disk import Disk
from router.batches.folder import Folder
from router.batches.gate import LineGate
from router.batches.library import Library
from router.batches.quota import Bounds
from router.batches.run import CountResult, Pause
from router.batches.runner import BatchRunner
from router.batches.store import Store


class BatchService:
    """Owns the folder and the batches between ``start`` and ``close``.

    max_concurrency: requests of batches at once. may_begin: whether no other request waits for workers; call ``look`` when
    that may have changed. clock: Unix seconds.
    """

    def __init__(
        self,
        path: Path,
        bounds: Bounds,
        answer: AnswerBody,
        *,
        max_concurrency: int,
        may_begin: Callable[[], bool],
        count_result: CountResult,
        clock: Callable[[], float],
        pause: Pause = asyncio.sleep,
        disk: Disk | None = None,
    ) -> None:
        disk = disk or Disk()
        self.library = Library(Store(Folder(path, disk), disk, bounds, clock))
        self._gate = LineGate(max_concurrency, may_begin)
        self.runner = BatchRunner(self.library, answer, self._gate, count_result, pause=pause)

    async def start(self) -> None:
        """Lock the folder and go on with its batches. Raises SettingError, UnavailableError."""
        await self.library.open()
        await self.runner.start()

    async def close(self) -> None:
        """Stop every request, and let others use the folder."""
        await self.runner.close()
        await self.library.close()

    def look(self) -> None:
        """Let requests begin that may."""
        self._gate.look()

    def give_way(self, number: int) -> None:
        """Stop so many of the requests that run, for others that wait for workers; they begin again later."""
        self._gate.give_way(number)

    async def gauges(self) -> tuple[Counter[str], int]:
        """Return how many batches there are by status, and how many bytes the files have."""
        return await self.library.run(self._gauges)

    def _gauges(self) -> tuple[Counter[str], int]:
        store = self.library.store
        return Counter(batch.status.value for batch in store.all_batches()), store.quota.num_bytes
