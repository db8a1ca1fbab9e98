"""One batch, from its current state to its end.

A run validates the input file, then answers its lines, each of which waits for a permit, is answered, and gets its result
line. A full or broken disk delays the batch and loses nothing: every call of the folder is repeated until it succeeds.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import BinaryIO, Protocol, TypeVar

import msgspec

from contract.errors import ErrorKind, UnavailableError
from router.batches import lifecycle
from router.batches.gate import LineGate, Permit
from router.batches.lifecycle import WrongStateError
from router.batches.lines import InputLine, Response, new_result
from router.batches.operations import Storage
from router.batches.records import BatchRecord, BatchStatus

logger = logging.getLogger(__name__)
_MAX_LATE_STARTS = 20
"""The number of times that one request may reach its deadline before its first token, while it waits for others."""
_MAX_LOST = 2
"""The number of times that one request may lose the last worker: the service stops, or the request is the cause."""
Pause = Callable[[float], Awaitable[None]]
"""Waits for a number of seconds."""
CountResult = Callable[[str, int], None]
"""(result of requests: completed, failed, expired, retried or stopped; number of requests)."""
T = TypeVar("T")
_LONGEST_PAUSE_SECONDS = 30.0
_BYTES_VALIDATED_AT_ONCE = 2**20
_LINES_EXPIRED_AT_ONCE = 1000


@dataclass(frozen=True, kw_only=True)
class LineAnswer:
    """The answer to a line's body, with the status that HTTP would have. body: JSON. kind: of an error, else None.

    has_workers: True if the service could answer another request at that moment.
    """

    request_id: str
    status_code: int
    body: bytes
    kind: ErrorKind | None = None
    has_workers: bool = True


class AnswerLine(Protocol):
    """Answers the body of a line, at a lower priority than every request that does not belong to a batch."""

    async def __call__(
        self, endpoint: str, body: bytes, tenant: str, on_begun: Callable[[], None]
    ) -> LineAnswer:
        """Answer ``body`` for ``tenant``. An error is an answer. Calls ``on_begun`` when the first token has arrived."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The parts. room_changed: returns an event that is set when the folder may have room again."""

    storage: Storage
    answer: AnswerLine
    gate: LineGate
    room_changed: Callable[[], asyncio.Event]
    count_result: CountResult
    pause: Pause = asyncio.sleep


class BatchRun:
    """Owns one open batch from ``run`` to its end."""

    def __init__(self, context: RunContext, batch: BatchRecord) -> None:
        self._context = context
        self._batch = batch
        self._operations = context.storage.operations
        self._storage = RetryingStorage(context.storage, context.pause, batch.id)
        self._scope: asyncio.Timeout | None = None

    async def run(self) -> None:
        """Validate, answer and end the batch. Cancel the task to stop; a later run continues from there."""
        try:
            while not await self._answer_in_time():
                pass
            # a batch whose input was rejected is over already
            if self._batch.is_open:
                await self._end()
        finally:
            await self._context.storage.run(self._operations.close_results, self._batch)

    def interrupt(self) -> None:
        """Stop the requests and check the record and the clock again: the batch continues, is cancelled, or has expired."""
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def _answer_in_time(self) -> bool:
        """Validate and answer the batch until it is done, cancelled or late. Return False if it was only interrupted."""
        batch = self._batch
        if batch.status not in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            return True
        seconds = await self._storage.run(self._operations.seconds_left, batch)
        try:
            try:
                async with asyncio.timeout(seconds) as self._scope:
                    await self._validate()
                    await self._answer_lines()
            finally:
                self._scope = None
        # three things end here: the window is over, the owner has cancelled, or something has changed that must be
        # looked at
        except (TimeoutError, WrongStateError):
            self._batch = await self._storage.run(self._operations.current, batch)
            if self._batch.status is BatchStatus.CANCELLING:
                return True
            if await self._storage.run(self._operations.seconds_left, self._batch):
                return False
            await self._change(lifecycle.expire)
        return True

    async def _validate(self) -> None:
        self._batch = await self._storage.run(self._operations.current, self._batch)
        if self._batch.status is not BatchStatus.VALIDATING:
            return
        async with self._input() as file:
            validation = self._operations.validation(self._batch, file)
            while not await self._storage.run(validation.advance, _BYTES_VALIDATED_AT_ONCE):
                pass
        if validation.problems:
            await self._change(lambda batch, now: lifecycle.reject(batch, validation.problems, now))
        else:
            await self._change(lambda batch, now: lifecycle.begin(batch, validation.total, now))

    async def _answer_lines(self) -> None:
        if self._batch.status is not BatchStatus.IN_PROGRESS:
            return
        runner = LineRunner(self._context, self._batch, self._storage)
        await self._storage.run(self._operations.open_results, self._batch)
        async with self._lines() as lines, asyncio.TaskGroup() as running:
            while await runner.begin_next(lines, running):
                pass
        await self._change(lifecycle.finalize)

    async def _end(self) -> None:
        batch = self._batch
        if batch.status is BatchStatus.FINALIZING and batch.is_expiring and batch.counts.total:
            await self._storage.run(self._operations.open_results, batch)
            async with self._lines() as lines:
                expire = self._operations.append_expired
                while num := await self._storage.run(expire, batch, lines, _LINES_EXPIRED_AT_ONCE):
                    self._context.count_result("expired", num)
        self._batch = await self._storage.run(self._operations.end, batch)
        counts = self._batch.counts
        logger.info(
            "batch %s is %s: %d of %d requests answered, %d failed",
            *(batch.id, self._batch.status, counts.completed, counts.total, counts.failed),
        )

    async def _change(self, transition: Callable[[BatchRecord, int], BatchRecord]) -> None:
        self._batch = await self._storage.run(self._operations.change, self._batch, transition)

    @asynccontextmanager
    async def _input(self) -> AsyncIterator[BinaryIO]:
        file = await self._storage.run(self._operations.open_input, self._batch)
        try:
            yield file
        finally:
            await self._context.storage.run(file.close)

    @asynccontextmanager
    async def _lines(self) -> AsyncIterator[Iterator[InputLine]]:
        async with self._input() as file:
            yield self._operations.lines(self._batch, file)


class RetryingStorage:
    """Runs the folder's calls for one batch, named in the log. A full or broken disk delays the batch and loses nothing."""

    def __init__(self, storage: Storage, pause: Pause, batch_id: str) -> None:
        self._storage = storage
        self._pause = pause
        self._batch_id = batch_id

    async def run(self, work: Callable[..., T], *args: object) -> T:
        """Return the result of ``work``, called on the folder's thread, again as long as the disk fails."""
        for attempt in count():
            try:
                return await self._storage.run(work, *args)
            except UnavailableError as error:
                logger.error("batch %s waits: %s", self._batch_id, error.message)
            await self._pause(pause_seconds(attempt))
        raise AssertionError("unreachable")


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
        changed = self._context.room_changed()
        while not await self._storage.run(self._operations.has_room, self._batch):
            logger.warning("batch %s waits: the folder of files is full", self._batch.id)
            await changed.wait()
            changed = self._context.room_changed()
        # the permit comes first: of a file of fifty thousand lines only those that may run are in memory
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
        # in any case, also if the task is cancelled before its first step
        task.add_done_callback(lambda _: self._gate.release(permit))
        return True

    async def _run(self, line: InputLine, permit: Permit) -> None:
        budget = RetryBudget()
        for attempt in count():
            answer = await self._gate.run(permit, partial(self._answer_once, line, permit))
            if not budget.allows_retry(answer, has_begun=permit.has_begun):
                break
            self._context.count_result("retried", 1)
            await self._context.pause(pause_seconds(attempt))
        response = Response(answer.status_code, answer.request_id, msgspec.Raw(answer.body))
        result = new_result(line.custom_id, response)
        await self._storage.run(self._operations.append, self._batch, result)
        self._context.count_result("completed" if result.is_answer else "failed", 1)

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


@dataclass
class RetryBudget:
    """Owns the counts of one request's failures that another try may not meet."""

    num_late: int = 0
    num_lost: int = 0

    def allows_retry(self, answer: LineAnswer, *, has_begun: bool) -> bool:
        """Count a failure, and return True if the request is tried once more. has_begun: its first token has arrived."""
        match answer.kind:
            # another try may succeed, and a batch has time
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


def pause_seconds(attempt: int) -> float:
    """Return the pause after the attempt with this number: 1, 2, 4, ... seconds."""
    return min(2.0 ** min(attempt, 10), _LONGEST_PAUSE_SECONDS)
