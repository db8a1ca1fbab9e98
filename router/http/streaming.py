"""Server-sent events: one ``data:`` line for each chunk, then ``data: [DONE]``; or an error and no [DONE].

``KeepAlive`` writes to a silent stream, so that a proxy or a client with an idle limit does not end it meanwhile.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import msgspec
from aiohttp import hdrs, web

from contract.errors import CancelledError
from router.http.bodies.body import Json
from serving.event_loop import stalled

Event = Json | bytes
"""An object of a stream, or the bytes of its event."""
_SMALL_BYTES = 2**14
"""Bytes that a transport with nothing unsent takes without pausing, which it does at 64 KiB."""


def data_event(content: Json) -> bytes:
    """Return the event of an object."""
    return b"data: %b\n\n" % msgspec.json.encode(content)


def _is_empty(transport: asyncio.Transport) -> bool:
    """Return True if the client is connected and everything was sent to it."""
    return not transport.is_closing() and not transport.get_write_buffer_size()


class EventStream:
    """The events of one response. Headers are sent with the first event, so an earlier error can still set the status.

    keep_alive: bytes that readers of events skip. last_write: time (monotonic) of the last write; before the first one, of
    the stream's making.
    """

    def __init__(
        self,
        request: web.Request,
        headers: dict[str, str],
        stall_seconds: float,
        *,
        keep_alive: bytes = b": keep-alive\n\n",
    ) -> None:
        self._request = request
        self._stall_seconds = stall_seconds
        self._transport: asyncio.Transport | None = None
        self._is_chunked = False
        self._preparing = asyncio.Lock()
        self._keep_alive = keep_alive
        self.last_write = time.monotonic()
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                # nginx would collect events until its buffer is full
                "X-Accel-Buffering": "no",
                **headers,
            }
        )

    @property
    def has_room(self) -> bool:
        """True if the headers were sent and a small write cannot wait for the client."""
        transport = self._transport
        # as ``_is_empty``, without a call: every token of every stream asks for it
        return transport is not None and not (transport.is_closing() or transport.get_write_buffer_size())

    def send_now(self, chunks: Sequence[Event] = ()) -> None:
        """Write chunks while there is room; without any, what readers skip."""
        assert self._transport is not None, "there is room only when the headers were sent"
        payload = self._events(chunks) if chunks else self._keep_alive
        # past aiohttp's writer: every token of every stream passes here
        self._transport.write(b"%x\r\n%b\r\n" % (len(payload), payload) if self._is_chunked else payload)
        self.last_write = time.monotonic()

    async def open(self) -> None:
        """Send the headers before there is an event. Does nothing if the client disconnected."""
        with contextlib.suppress(ConnectionResetError):
            await self._put(self._keep_alive, is_last=False)

    async def send(self, chunks: Sequence[Event]) -> None:
        """Write chunks. Raises CancelledError when the client has read nothing for too long."""
        await self._write(self._events(chunks))

    async def end(self) -> None:
        """Write ``[DONE]`` and end the response. Raises CancelledError as ``send`` does."""
        await self._write(b"data: [DONE]\n\n", is_last=True)

    async def fail(self, error: dict[str, Any]) -> None:
        """Write an error object as the last event and end the response. Does nothing if the client disconnected."""
        with contextlib.suppress(CancelledError, ConnectionResetError):
            await self._write(self._event(error), is_last=True)

    def _event(self, chunk: Event) -> bytes:
        return chunk if isinstance(chunk, bytes) else data_event(chunk)

    def _events(self, chunks: Sequence[Event]) -> bytes:
        return self._event(chunks[0]) if len(chunks) == 1 else b"".join(map(self._event, chunks))

    async def _write(self, payload: bytes, *, is_last: bool = False) -> None:
        """Write, and end the response after the last payload. The connection of a client that stalls is closed."""
        transport = self._request.transport
        # most writes cannot wait for the client, and then need no time limit
        if len(payload) <= _SMALL_BYTES and transport is not None and _is_empty(transport):
            await self._put(payload, is_last=is_last)
            return
        try:
            async with asyncio.timeout(self._stall_seconds):
                await self._put(payload, is_last=is_last)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()  # else ending the response waits for the client as well
            raise stalled(self._stall_seconds) from None

    async def _put(self, payload: bytes, *, is_last: bool) -> None:
        async with self._preparing:  # the first event may come while ``open`` sends the headers
            if not self.response.prepared:
                await self.response.prepare(self._request)
        self.last_write = time.monotonic()
        if is_last:
            await self.response.write_eof(payload)
        # an empty chunk would be the end of a chunked response
        elif payload:
            await self.response.write(payload)
            # known only now: to a client of HTTP/1.0 the same bytes are sent without chunks
            self._is_chunked = self.response.headers.get(hdrs.TRANSFER_ENCODING) == "chunked"
            self._transport = self._request.transport


class NamedEventStream(EventStream):
    """Events with their ``type`` in an ``event:`` line, without [DONE]. failed: returns the events for an error object."""

    def __init__(
        self,
        failed: Callable[[dict[str, Any]], list[dict[str, Any]]],
        request: web.Request,
        headers: dict[str, str],
        stall_seconds: float,
        **options: bytes,
    ) -> None:
        super().__init__(request, headers, stall_seconds, **options)
        self._failed = failed

    async def end(self) -> None:
        """End the response. Raises CancelledError as ``send`` does."""
        await self._write(b"", is_last=True)

    async def fail(self, error: dict[str, Any]) -> None:
        """Write the events for an error object and end the response. Does nothing if the client disconnected."""
        with contextlib.suppress(CancelledError, ConnectionResetError):
            await self._write(b"".join(map(self._event, self._failed(error))), is_last=True)

    def _event(self, chunk: Event) -> bytes:
        if isinstance(chunk, bytes):
            raise TypeError("an event with a name is an object with its type")
        return f"event: {chunk['type']}\n".encode() + data_event(chunk)


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
            self._stream.send_now()
        self._look_after(self._seconds)
