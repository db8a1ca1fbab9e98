"""Server-sent events: one ``data:`` line for each chunk, then ``data: [DONE]``; or an error and no [DONE]."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from aiohttp import hdrs, web

from contract.errors import CancelledError
from router.http.formatter import Event
from serving.stall_limit import stalled

_SMALL_BYTES = 2**14
"""Bytes that a transport with nothing unsent takes without pausing, which it does at 64 KiB."""


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
                "X-Accel-Buffering": "no",
                **headers,
            }
        )

    @property
    def has_room(self) -> bool:
        """True if the headers were sent and a small write cannot wait for the client."""
        transport = self._transport
        return transport is not None and _is_empty(transport)

    def send_now(self, chunks: Sequence[Event]) -> None:
        """Write chunks while there is room, past aiohttp's writer: every token of every stream passes here."""
        self._write_now(self._events(chunks))

    def write_keep_alive(self) -> None:
        """Write what readers skip, while there is room."""
        self._write_now(self._keep_alive)

    def _write_now(self, payload: bytes) -> None:
        assert self._transport is not None, "there is room only when the headers were sent"
        self._transport.write(b"%x\r\n%b\r\n" % (len(payload), payload) if self._is_chunked else payload)
        self.last_write = time.monotonic()

    async def open(self) -> None:
        """Send the headers before there is an event. Does nothing if the client disconnected."""
        with contextlib.suppress(ConnectionResetError):
            await self._put(self._keep_alive, is_last=False)

    async def send(self, chunks: Sequence[Event]) -> None:
        """Write chunks. Raises CancelledError when the client has read nothing for too long."""
        await self._write(self._events(chunks))

    async def done(self) -> None:
        """Write ``[DONE]`` and end the response. Raises CancelledError as ``send`` does."""
        await self._write(b"data: [DONE]\n\n", is_last=True)

    async def fail(self, error: dict[str, Any]) -> None:
        """Write an error object as the last event and end the response. Does nothing if the client disconnected."""
        with contextlib.suppress(CancelledError, ConnectionResetError):
            await self._write(self._event(error), is_last=True)

    def _event(self, chunk: Event) -> bytes:
        payload = chunk if isinstance(chunk, msgspec.Raw) else msgspec.json.encode(chunk)
        return b"data: %b\n\n" % payload

    def _events(self, chunks: Sequence[Event]) -> bytes:
        return self._event(chunks[0]) if len(chunks) == 1 else b"".join(map(self._event, chunks))

    async def _write(self, payload: bytes, *, is_last: bool = False) -> None:
        """Write, and end the response after the last payload. The connection of a client that stalls is closed."""
        if self._has_room(payload):
            await self._put(payload, is_last=is_last)
            return
        try:
            async with asyncio.timeout(self._stall_seconds):
                await self._put(payload, is_last=is_last)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()  # else ending the response waits for the client as well
            raise stalled(self._stall_seconds) from None

    def _has_room(self, payload: bytes) -> bool:
        """Return True if a write cannot wait for the client, so that it needs no time limit: most writes cannot."""
        transport = self._request.transport
        return len(payload) <= _SMALL_BYTES and transport is not None and _is_empty(transport)

    async def _put(self, payload: bytes, *, is_last: bool) -> None:
        async with self._preparing:  # the first event may come while ``open`` sends the headers
            if not self.response.prepared:
                await self.response.prepare(self._request)
        self.last_write = time.monotonic()
        if is_last:
            await self.response.write_eof(payload)
        elif payload:
            await self.response.write(payload)
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

    async def done(self) -> None:
        """End the response. Raises CancelledError as ``send`` does."""
        await self._write(b"", is_last=True)

    async def fail(self, error: dict[str, Any]) -> None:
        """Write the events for an error object and end the response. Does nothing if the client disconnected."""
        with contextlib.suppress(CancelledError, ConnectionResetError):
            await self._write(b"".join(map(self._event, self._failed(error))), is_last=True)

    def _event(self, chunk: Event) -> bytes:
        if isinstance(chunk, msgspec.Raw):
            raise TypeError("an event with a name is an object with its type")
        return f"event: {chunk['type']}\n".encode() + super()._event(chunk)
