"""Bytes on a silent stream, so that a proxy or a client with an idle limit does not end it while the service works."""

import asyncio
import time
from typing import Self

from router.http.streaming import EventStream


class KeepAlive:
    """Within its block, writes to a stream that was silent for ``seconds``; 0: never.

    The first write of a stream sends the status and the headers, so an error after it is the stream's last event. The
    silence of every wait counts: for a place in the queue, a worker, the prompt, the hand-over, a move, the next token.
    """

    def __init__(self, stream: EventStream, seconds: float) -> None:
        self._stream = stream
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._opening: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        if self._seconds:
            self._look_after(self._seconds)
        return self

    def __exit__(self, *_: object) -> None:
        # An error that is raised now must find headers that were sent, or none that are about to be.
        if self._timer:
            self._timer.cancel()
        if self._opening:
            self._opening.cancel()

    def _look_after(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        """Write if the silence is too long by now, and look again when it may be."""
        rest = self._stream.last_write + self._seconds - time.monotonic()
        if rest > 0:
            self._look_after(rest)
            return
        if not self._stream.response.prepared:
            self._opening = asyncio.create_task(
                self._stream.open(), name="send the headers of a silent stream"
            )
        elif self._stream.has_room:  # else the client does not read what it has
            self._stream.write_keep_alive()
        self._look_after(self._seconds)
