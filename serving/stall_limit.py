"""A time limit for each write of a stream, with one timer for all of them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

from contract.errors import CancelledError


class StallLimit:
    """Ends ``scope`` when a write has waited ``seconds`` for the client. Made by ``stall_limit``.

    Its timer looks at the write that waits. Time limits of their own would cost more than the writes of most streams.
    """

    def __init__(self, seconds: float, scope: asyncio.Timeout) -> None:
        self._seconds = seconds
        self._scope = scope
        self._loop = asyncio.get_running_loop()
        self._began: float | None = None
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
