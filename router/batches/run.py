"""One batch from wherever it stands to its end."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import BinaryIO, TypeVar

import msgspec

from contract.errors import ErrorKind, UnavailableError
from router.batches import lifecycle
from router.batches.answering import AnswerBody, Answered
from router.batches.gate import LineGate, Place
from router.batches.input_lines import InputLine
from router.batches.library import Library
from router.batches.lifecycle import WrongStateError
from router.batches.records import BatchRecord, BatchStatus
from router.batches.results import Response, new_result

logger = logging.getLogger(__name__)

T = TypeVar("T")
Pause = Callable[[float], Awaitable[None]]
CountResult = Callable[[str, int], None]
"""(what became of requests: completed, failed, expired, retried or stopped; how many)."""
_MAX_LATE_STARTS = 20
"""How often a request may reach its deadline before its first token, waiting behind others."""
_MAX_LOST = 2
"""How often a request may lose the last worker: the service may be going down, or the request may be why."""
_LONGEST_PAUSE_SECONDS = 30.0
_VALIDATED_AT_ONCE_BYTES = 2**20
_EXPIRED_AT_ONCE = 1000


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """What every run works with. pause: waits so many seconds."""

    library: Library
    answer: AnswerBody
    gate: LineGate
    room_changed: Callable[[], asyncio.Event]
    count_result: CountResult
    pause: Pause = asyncio.sleep


@dataclass
class Tries:
    """Owns the counts of what one request has met that another try may not meet."""

    num_late: int = 0
    num_lost: int = 0

    def may_go_on(self, answered: Answered, *, has_begun: bool) -> bool:
        """Whether the request is tried once more. has_begun: its first token has come."""
        match answered.kind:
            case ErrorKind.OVERLOADED | ErrorKind.UNAVAILABLE:
                return True
            case ErrorKind.DEADLINE if not has_begun:
                self.num_late += 1
                return self.num_late < _MAX_LATE_STARTS
            case ErrorKind.WORKER_LOST if not answered.has_workers:
                self.num_lost += 1
                return self.num_lost < _MAX_LOST
            case _:
                return False


class BatchRun:
    """Owns one batch that is not over, from ``run`` to its end."""

    def __init__(self, parts: RunParts, batch: BatchRecord) -> None:
        self._parts = parts
        self._batch = batch
        self._desk = parts.library.desk
        self._scope: asyncio.Timeout | None = None

    async def run(self) -> None:
        """Validate, answer and end the batch. Cancel the task to leave it as it is; a later run goes on from there."""
        try:
            while not await self._answer_in_time():
                pass
            if self._batch.is_open:
                await self._end()
        finally:
            await self._parts.library.run(self._desk.close_results, self._batch)

    def interrupt(self) -> None:
        """Stop the requests, and look at the record and the clock: the batch goes on, is cancelled, or has expired."""
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def _answer_in_time(self) -> bool:
        """Validate and answer until all is answered, or the batch is cancelled or late. False to go on."""
        batch = self._batch
        if batch.status not in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            return True
        seconds = await self._call(self._desk.seconds_left, batch)
        try:
            await self._answer_within(seconds)
        except (TimeoutError, WrongStateError):
            self._batch = await self._call(self._desk.current, batch)
            if self._batch.status is BatchStatus.CANCELLING:
                return True
            if not await self._call(self._desk.is_late, self._batch):
                return False
            await self._change(lifecycle.expire)
        return True

    async def _answer_within(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds) as self._scope:
                await self._validate()
                await self._work()
        finally:
            self._scope = None

    async def _validate(self) -> None:
        self._batch = await self._call(self._desk.current, self._batch)
        if self._batch.status is not BatchStatus.VALIDATING:
            return
        async with self._input() as file:
            validation = self._desk.validation(self._batch, file)
            while not await self._call(validation.advance, _VALIDATED_AT_ONCE_BYTES):
                pass
        if validation.problems:
            await self._change(lambda batch, now: lifecycle.reject(batch, validation.problems, now))
        else:
            await self._change(lambda batch, now: lifecycle.begin(batch, validation.total, now))

    async def _work(self) -> None:
        if self._batch.status is not BatchStatus.IN_PROGRESS:
            return
        await self._call(self._desk.open_results, self._batch)
        async with self._lines() as lines, asyncio.TaskGroup() as running:
            while await self._begin_line(lines, running):
                pass
        await self._change(lifecycle.finalize)

    async def _begin_line(self, lines: Iterator[InputLine], running: asyncio.TaskGroup) -> bool:
        """Wait for a place, then begin the next line. False where there is none."""
        await self._wait_for_room()
        place = await self._parts.gate.acquire(self._batch.owner)
        try:
            line = await self._call(next, lines, None)
        except BaseException:
            self._parts.gate.release(place)
            raise
        if line is None:
            self._parts.gate.release(place)
            return False
        task = running.create_task(self._answer_line(line, place), name=f"a line of {self._batch.id}")
        task.add_done_callback(lambda _: self._parts.gate.release(place))
        return True

    async def _answer_line(self, line: InputLine, place: Place) -> None:
        answered = await self._answered(line, place)
        response = Response(answered.status_code, answered.request_id, msgspec.Raw(answered.body))
        result = new_result(line.custom_id, response)
        await self._call(self._desk.append, self._batch, result)
        self._parts.count_result("completed" if result.is_answer else "failed", 1)

    async def _answered(self, line: InputLine, place: Place) -> Answered:
        """Answer a line, again and again while the service is busy."""
        tries = Tries()
        for attempt in count():
            answered = await self._parts.gate.run(place, partial(self._ask, line, place))
            if not tries.may_go_on(answered, has_begun=place.has_begun):
                return answered
            self._parts.count_result("retried", 1)
            await self._parts.pause(_seconds(attempt))
        raise AssertionError("unreachable")

    async def _ask(self, line: InputLine, place: Place) -> Answered:
        def on_begun() -> None:
            place.has_begun = True

        try:
            return await self._parts.answer(self._batch.endpoint, line.body, self._batch.owner, on_begun)
        except asyncio.CancelledError:
            if place.is_stopping:
                self._parts.count_result("stopped", 1)
            raise

    async def _end(self) -> None:
        if (
            self._batch.status is BatchStatus.FINALIZING
            and self._batch.is_expiring
            and self._batch.counts.total
        ):
            await self._call(self._desk.open_results, self._batch)
            async with self._lines() as lines:
                while num := await self._call(
                    self._desk.append_expired, self._batch, lines, _EXPIRED_AT_ONCE
                ):
                    self._parts.count_result("expired", num)
        self._batch = await self._call(self._desk.end, self._batch)
        counts = self._batch.counts
        logger.info(
            "batch %s is %s: %d of %d requests answered, %d failed",
            *(self._batch.id, self._batch.status, counts.completed, counts.total, counts.failed),
        )

    async def _wait_for_room(self) -> None:
        changed = self._parts.room_changed()
        while not await self._call(self._desk.has_room, self._batch):
            logger.warning("batch %s waits: the folder of files is full", self._batch.id)
            await changed.wait()
            changed = self._parts.room_changed()

    async def _change(self, transition: Callable[[BatchRecord, int], BatchRecord]) -> None:
        self._batch = await self._call(self._desk.change, self._batch, transition)

    @asynccontextmanager
    async def _input(self) -> AsyncIterator[BinaryIO]:
        file = await self._call(self._desk.open_input, self._batch)
        try:
            yield file
        finally:
            await self._parts.library.run(file.close)

    @asynccontextmanager
    async def _lines(self) -> AsyncIterator[Iterator[InputLine]]:
        async with self._input() as file:
            yield self._desk.lines(self._batch, file)

    async def _call(self, work: Callable[..., T], *args: object) -> T:
        """Call ``work`` on the folder's thread, again and again while the disk does not take it."""
        for attempt in count():
            try:
                return await self._parts.library.run(work, *args)
            except UnavailableError as error:
                logger.error("batch %s waits: %s", self._batch.id, error.message)
            await self._parts.pause(_seconds(attempt))
        raise AssertionError("unreachable")


def _seconds(attempt: int) -> float:
    """Return the pause behind the attempt of this number: 1, 2, 4, ... seconds."""
    return min(2.0 ** min(attempt, 10), _LONGEST_PAUSE_SECONDS)
