"""The files and batches of one router, started and stopped in order.

Batches are started when they are created, and continued when the router starts again.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from contract.errors import UnavailableError
from router.batches.folder import Disk, Folder
from router.batches.gate import LineGate
from router.batches.operations import NewBatch, Storage
from router.batches.records import BatchRecord
from router.batches.run import AnswerLine, BatchRun, CountResult, Pause, RunContext
from router.batches.store import FolderLimits, Store
from router.concurrency import ChangeSignal, TaskSet

logger = logging.getLogger(__name__)
_SWEEP_SECONDS = 600.0


class BatchService:
    """Owns the folder and the batches between ``start`` and ``close``.

    max_concurrency: requests of batches at once. may_begin: returns True while no other request waits for workers; call
    ``gate.admit`` when that may have changed. clock: Unix seconds.
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
        self.gate = LineGate(max_concurrency, may_begin)
        self.runner = BatchRunner(self.storage, answer, self.gate, count_result, pause=pause)

    async def start(self) -> None:
        """Lock the folder and continue its batches. Raises SettingError, UnavailableError."""
        await self.storage.open()
        await self.runner.start()

    async def close(self) -> None:
        """Stop every request and unlock the folder."""
        await self.runner.close()
        await self.storage.close()

    async def gauges(self) -> tuple[Counter[str], int]:
        """Return the number of batches by status, and the bytes of the files."""
        store = self.storage.store
        return await self.storage.run(
            lambda: (Counter(batch.status.value for batch in store.all_batches()), store.quota.num_bytes)
        )


class BatchRunner:
    """Owns the task of every open batch, between ``start`` and ``close``.

    pause: waits between two tries. sweep_pause: waits between two sweeps of old files.
    """

    def __init__(
        self,
        storage: Storage,
        answer: AnswerLine,
        gate: LineGate,
        count_result: CountResult,
        *,
        pause: Pause = asyncio.sleep,
        sweep_pause: Pause = asyncio.sleep,
    ) -> None:
        self._storage = storage
        self._sweep_pause = sweep_pause
        self._room = ChangeSignal()
        self._context = RunContext(
            storage=storage,
            answer=answer,
            gate=gate,
            room_changed=lambda: self._room.next,
            count_result=count_result,
            pause=pause,
        )
        self._tasks = TaskSet()
        self._runs: dict[str, BatchRun] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._is_closed = False

    async def start(self) -> None:
        """Continue the batches that an earlier router has left."""
        batches = await self._storage.run(self._storage.store.open_batches)
        for batch in batches:
            self._begin(batch)
        if batches:
            logger.info("continuing %d batches", len(batches))
        self._sweeper = asyncio.create_task(self._sweep(), name="remove old files")

    async def close(self) -> None:
        """Stop all batches; a later router continues them."""
        self._is_closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper])
        # at once: what is lost are answers to lines without a result, which are computed again
        await self._tasks.close(0.0)

    async def create(self, new: NewBatch) -> BatchRecord:
        """Store a batch and start it, even if the caller is cancelled meanwhile. Raises KvbatonError."""
        return await asyncio.shield(asyncio.create_task(self._create(new)))

    async def cancel(self, owner: str, batch_id: str) -> BatchRecord:
        """Cancel a batch, even if the caller is cancelled meanwhile. Raises KvbatonError."""
        return await asyncio.shield(asyncio.create_task(self._cancel(owner, batch_id)))

    async def delete_file(self, owner: str, file_id: str) -> None:
        """Delete a file, and let batches that wait for room check again. Raises KvbatonError."""
        await self._storage.run(self._storage.store.delete_file, owner, file_id)
        self._room.notify()

    def recheck(self, batch_id: str) -> None:
        """Let a batch check its record and the clock after one of them has changed."""
        if (run := self._runs.get(batch_id)) is not None:
            run.interrupt()

    async def _create(self, new: NewBatch) -> BatchRecord:
        batch = await self._storage.run(self._storage.operations.create, new)
        self._begin(batch)
        return batch

    async def _cancel(self, owner: str, batch_id: str) -> BatchRecord:
        batch = await self._storage.run(self._storage.operations.cancel, owner, batch_id)
        self.recheck(batch.id)
        return await self._storage.run(self._storage.operations.show, batch)

    def _begin(self, batch: BatchRecord) -> None:
        # created while the router stops: the next start continues it
        if self._is_closed:
            return
        run = self._runs[batch.id] = BatchRun(self._context, batch)
        task = self._tasks.spawn(run.run(), f"batch {batch.id}")
        task.add_done_callback(lambda _: self._runs.pop(batch.id))

    async def _sweep(self) -> None:
        while True:
            await self._sweep_pause(_SWEEP_SECONDS)
            try:
                await self._storage.run(self._storage.store.sweep)
            except UnavailableError as error:
                logger.error("old files were not removed: %s; retrying later", error.message)
            self._room.notify()
