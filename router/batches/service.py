"""The files and batches of one router, started and stopped in order."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from router.batches.answering import AnswerLine
from router.batches.disk import Disk
from router.batches.folder import Folder
from router.batches.gate import LineGate
from router.batches.quota import FolderLimits
from router.batches.run_context import CountResult, Pause
from router.batches.runner import BatchRunner
from router.batches.storage import Storage
from router.batches.store import Store


class BatchService:
    """Owns the folder and the batches between ``start`` and ``close``.

    max_concurrency: requests of batches at once. may_begin: returns True while no other request waits for workers; call
    ``admit`` when that may have changed. clock: Unix seconds.
    """

    def __init__(
        self,
        path: Path,
        limits: FolderLimits,
        answer: AnswerLine,
        *,
        max_concurrency: int,
        may_begin: Callable[[], bool],
        count_result: CountResult,
        clock: Callable[[], float],
        pause: Pause = asyncio.sleep,
        disk: Disk | None = None,
    ) -> None:
        disk = disk or Disk()
        self.storage = Storage(Store(Folder(path, disk), disk, limits, clock))
        self._gate = LineGate(max_concurrency, may_begin)
        self.runner = BatchRunner(self.storage, answer, self._gate, count_result, pause=pause)

    async def start(self) -> None:
        """Lock the folder and continue its batches. Raises SettingError, UnavailableError."""
        await self.storage.open()
        await self.runner.start()

    async def close(self) -> None:
        """Stop every request and unlock the folder."""
        await self.runner.close()
        await self.storage.close()

    def admit(self) -> None:
        """Start waiting requests of batches, if they may begin now."""
        self._gate.admit()

    def preempt(self, number: int) -> None:
        """Stop ``number`` running requests of batches to free their workers; they begin again later."""
        self._gate.preempt(number)

    def num_by_state(self) -> dict[str, int]:
        """See LineGate."""
        return self._gate.num_by_state()

    async def gauges(self) -> tuple[Counter[str], int]:
        """Return the number of batches by status, and the bytes of the files."""
        return await self.storage.run(self._gauges)

    def _gauges(self) -> tuple[Counter[str], int]:
        store = self.storage.store
        return Counter(batch.status.value for batch in store.all_batches()), store.quota.num_bytes
