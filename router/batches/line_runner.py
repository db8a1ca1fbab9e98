"""The requests of one batch: each waits for a permit, is answered, and gets its result line."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

import msgspec

from contract.errors import ErrorKind
from router.batches.answering import LineAnswer
from router.batches.gate import Permit
from router.batches.input_lines import InputLine
from router.batches.records import BatchRecord
from router.batches.results import Response, new_result
from router.batches.retrying import RetryingStorage, pause_seconds
from router.batches.run_context import RunContext

logger = logging.getLogger(__name__)

_MAX_LATE_STARTS = 20
"""The number of times that one request may reach its deadline before its first token, while it waits for others."""
_MAX_LOST = 2
"""The number of times that one request may lose the last worker: the service stops, or the request is the cause."""


@dataclass
class RetryBudget:
    """Owns the counts of one request's failures that another try may not meet."""

    num_late: int = 0
    num_lost: int = 0

    def allows_retry(self, answer: LineAnswer, *, has_begun: bool) -> bool:
        """Count a failure, and return True if the request is tried once more. has_begun: its first token has arrived."""
        match answer.kind:
            case ErrorKind.OVERLOADED | ErrorKind.UNAVAILABLE:
                return True
            case ErrorKind.DEADLINE if not has_begun:
                self.num_late += 1
                return self.num_late < _MAX_LATE_STARTS
            case ErrorKind.WORKER_LOST if not answer.has_workers:
                self.num_lost += 1
                return self.num_lost < _MAX_LOST
            case _:
                return False


class LineRunner:
    """Answers the lines of ``batch``, whose result files are open."""

    def __init__(self, context: RunContext, batch: BatchRecord, storage: RetryingStorage) -> None:
        self._context = context
        self._batch = batch
        self._storage = storage
        self._operations = context.storage.operations
        self._gate = context.gate

    async def begin_next(self, lines: Iterator[InputLine], running: asyncio.TaskGroup) -> bool:
        """Wait for room and for a permit, and begin the next line in ``running``. Return False if no line is left."""
        await self._wait_for_room()
        permit = await self._gate.acquire(self._batch.owner)
        try:
            line = await self._storage.run(next, lines, None)
        except BaseException:
            self._gate.release(permit)
            raise
        if line is None:
            self._gate.release(permit)
            return False
        task = running.create_task(self._run(line, permit), name=f"a line of {self._batch.id}")
        task.add_done_callback(lambda _: self._gate.release(permit))
        return True

    async def _wait_for_room(self) -> None:
        changed = self._context.room_changed()
        while not await self._storage.run(self._operations.has_room, self._batch):
            logger.warning("batch %s waits: the folder of files is full", self._batch.id)
            await changed.wait()
            changed = self._context.room_changed()

    async def _run(self, line: InputLine, permit: Permit) -> None:
        answer = await self._answer_with_retries(line, permit)
        response = Response(answer.status_code, answer.request_id, msgspec.Raw(answer.body))
        result = new_result(line.custom_id, response)
        await self._storage.run(self._operations.append, self._batch, result)
        self._context.count_result("completed" if result.is_answer else "failed", 1)

    async def _answer_with_retries(self, line: InputLine, permit: Permit) -> LineAnswer:
        budget = RetryBudget()
        for attempt in count():
            answer = await self._gate.run(permit, partial(self._answer_once, line, permit))
            if not budget.allows_retry(answer, has_begun=permit.has_begun):
                return answer
            self._context.count_result("retried", 1)
            await self._context.pause(pause_seconds(attempt))
        raise AssertionError("unreachable")

    async def _answer_once(self, line: InputLine, permit: Permit) -> LineAnswer:
        def on_begun() -> None:
            permit.has_begun = True

        try:
            batch = self._batch
            return await self._context.answer(batch.endpoint, line.body, batch.owner, on_begun)
        except asyncio.CancelledError:
            if permit.is_stopping:
                self._context.count_result("stopped", 1)
            raise
