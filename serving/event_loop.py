"""The event loop of every service (uvloop, which takes less time than asyncio's for a connection, a write and a turn).

Waits in it may be ended by a time limit, an event or a cancel, and each write of a stream has a time limit.
"""

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import uvloop

from contract.errors import CancelledError

# Python looks for garbage in cycles after so many: a request makes hundreds, and hardly any are in cycles.
_NEW_OBJECTS = 5_000


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a service until it ends, or until Ctrl-C cancels it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_without_list_of_generators(main))


async def _without_list_of_generators(main: Coroutine[Any, Any, None]) -> None:
    """Run ``main`` in a loop that keeps no list of open generators: a request opens nine, and each ends with its block."""
    sys.set_asyncgen_hooks(firstiter=None)
    await main


def freeze_objects() -> None:
    """Keep the search for garbage from the objects of now: it would take 0.1 s, in which no token is sent."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 20, 20)


async def ends_within(waiting: Coroutine[Any, Any, Any], seconds: float, at_once: asyncio.Event) -> bool:
    """Run ``waiting`` for ``seconds``, or until ``at_once``; return whether it has ended by itself. Raises its error."""
    ending = asyncio.create_task(waiting, name="wait that may be ended")
    waits = [ending, asyncio.create_task(at_once.wait(), name="wait for the end of a wait")]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        has_ended = ending.done()
    finally:
        for task in waits:
            task.cancel()
        await asyncio.wait(waits)
    if has_ended:
        ending.result()
    return has_ended


def is_being_cancelled() -> bool:
    """Return True if the running task is being cancelled. gRPC raises the same error for a call that was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class StallLimit:
    """Ends ``scope`` when a write has waited ``seconds`` for the client. Made by ``stall_limit``."""

    def __init__(self, seconds: float, scope: asyncio.Timeout) -> None:
        self._seconds = seconds
        self._scope = scope
        self._loop = asyncio.get_running_loop()
        self._began: float | None = None
        # One timer for all writes: a time limit of its own would cost more than a write does in most streams.
        self._timer = self._loop.call_later(seconds, self._look)

    async def write(self, writing: Awaitable[object]) -> None:
        """Wait for a write."""
        self._began = self._loop.time()
        await writing
        self._began = None

    def close(self) -> None:
        """Stop the timer."""
        self._timer.cancel()

    def _look(self) -> None:
        """End the scope, or look again when the write that waits now, or one that begins now, will have waited too long."""
        now = self._loop.time()
        end = (now if self._began is None else self._began) + self._seconds
        if end <= now:
            self._scope.reschedule(now)
        else:
            self._timer = self._loop.call_at(end, self._look)


def stalled(seconds: float) -> CancelledError:
    """Return the error of a request whose client has read nothing for ``seconds``."""
    return CancelledError(f"the client has read nothing for {seconds} s; the request is cancelled")


@asynccontextmanager
async def stall_limit(seconds: float) -> AsyncIterator[StallLimit]:
    """Restrict the time of each write within the block. Raises CancelledError when a client has read nothing for so long."""
    scope = asyncio.timeout(None)
    try:
        async with scope:
            limit = StallLimit(seconds, scope)
            try:
                yield limit
            finally:
                limit.close()
    except TimeoutError:
        if not scope.expired():
            raise
        raise stalled(seconds) from None
