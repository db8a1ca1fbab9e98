"""One batch, from its current state to its end."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import BinaryIO

from router.batches import lifecycle
from router.batches.input_lines import InputLine
from router.batches.lifecycle import WrongStateError
from router.batches.line_runner import LineRunner
from router.batches.records import BatchRecord, BatchStatus
from router.batches.retrying import RetryingStorage
from router.batches.run_context import RunContext

logger = logging.getLogger(__name__)

_BYTES_VALIDATED_AT_ONCE = 2**20
_LINES_EXPIRED_AT_ONCE = 1000


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
            await self._answer_within(seconds)
        except (TimeoutError, WrongStateError):
            self._batch = await self._storage.run(self._operations.current, batch)
            if self._batch.status is BatchStatus.CANCELLING:
                return True
            if not await self._storage.run(self._operations.is_late, self._batch):
                return False
            await self._change(lifecycle.expire)
        return True

    async def _answer_within(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds) as self._scope:
                await self._validate()
                await self._answer_lines()
        finally:
            self._scope = None

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
