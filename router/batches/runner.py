"""All batches of a router: begun when they are created, and again when the router is started."""

import asyncio
import logging

from contract.errors import UnavailableError
from router.batches.answering import AnswerBody
from router.batches.desk import NewBatch
from router.batches.gate import LineGate
from router.batches.library import Library
from router.batches.records import BatchRecord
from router.batches.run import BatchRun, CountResult, Pause, RunParts
from router.change_signal import ChangeSignal
from router.tasks import TaskSet

logger = logging.getLogger(__name__)

_SWEEP_SECONDS = 600.0


class BatchRunner:
    """Owns the task of every batch that is not over, between ``start`` and ``close``.

    pause, sweep_pause: wait so many seconds, between two tries and between two looks for old files.
    """

    def __init__(
        self,
        library: Library,
        answer: AnswerBody,
        gate: LineGate,
        count_result: CountResult,
        *,
        pause: Pause = asyncio.sleep,
        sweep_pause: Pause = asyncio.sleep,
    ) -> None:
        self._library = library
        self._sweep_pause = sweep_pause
        self._room = ChangeSignal()
        self._parts = RunParts(
            library=library,
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
        """Go on with the batches that an earlier router has left."""
        batches = await self._library.run(self._library.store.open_batches)
        for batch in batches:
            self._begin(batch)
        if batches:
            logger.info("%d batches go on where they stopped", len(batches))
        self._sweeper = asyncio.create_task(self._sweep(), name="remove old files")

    async def close(self) -> None:
        """Stop; a later router goes on from here."""
        self._is_closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper])
        await self._tasks.close(0.0)

    async def create(self, new: NewBatch) -> BatchRecord:
        """Keep a batch and begin it, also where the caller is cancelled meanwhile. Raises KvbatonError."""
        return await asyncio.shield(asyncio.create_task(self._create(new)))

    async def cancel(self, owner: str, batch_id: str) -> BatchRecord:
        """Stop the requests of a batch, also where the caller is cancelled meanwhile. Raises KvbatonError."""
        return await asyncio.shield(asyncio.create_task(self._cancel(owner, batch_id)))

    async def delete_file(self, owner: str, file_id: str) -> None:
        """Delete a file; batches that wait for room go on. Raises KvbatonError."""
        await self._library.run(self._library.store.delete_file, owner, file_id)
        self._room.notify()

    def look_again(self, batch_id: str) -> None:
        """Have a batch look at its record and the clock, after one of them was changed."""
        if (run := self._runs.get(batch_id)) is not None:
            run.interrupt()

    async def _create(self, new: NewBatch) -> BatchRecord:
        batch = await self._library.run(self._library.desk.create, new)
        self._begin(batch)
        return batch

    async def _cancel(self, owner: str, batch_id: str) -> BatchRecord:
        batch = await self._library.run(self._library.desk.cancel, owner, batch_id)
        self.look_again(batch.id)
        return await self._library.run(self._library.desk.show, batch)

    def _begin(self, batch: BatchRecord) -> None:
        if self._is_closed:
            return
        run = self._runs[batch.id] = BatchRun(self._parts, batch)
        task = self._tasks.spawn(run.run(), f"batch {batch.id}")
        task.add_done_callback(lambda _: self._runs.pop(batch.id))

    async def _sweep(self) -> None:
        while True:
            await self._sweep_pause(_SWEEP_SECONDS)
            try:
                await self._library.run(self._library.store.sweep)
            except UnavailableError as error:
                logger.error("old files are not removed: %s; this is tried again", error.message)
            self._room.notify()
