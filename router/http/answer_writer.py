"""The answer to an exchange, written to its client as one JSON object or as a stream of events."""

import logging
import re
from collections.abc import Mapping

from aiohttp import web

from router.answers.answer import Delta
from router.http.boundary import STREAM, request_id_header
from router.http.exchange import Exchange
from router.http.formatter import AnswerFormatter
from router.http.keep_alive import KeepAlive
from router.http.lifetime import let_client_cancel
from router.http.streaming import EventStream
from router.http.timing_header import server_timing
from router.pipeline import Pipeline

logger = logging.getLogger(__name__)

LEFT_OUT = "x-kvbaton-tools-left-out"
"""Header of a response: the types of the request's tools that cannot run here."""
_MAX_NAMED = 16
_MAX_TOLD = 64
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


class AnswerWriter:
    """Sends the requests of exchanges through the pipeline and writes their answers.

    stall_seconds: how long a client may read nothing of a stream. keep_alive_seconds: see ``KeepAlive``.
    """

    def __init__(self, pipeline: Pipeline, stall_seconds: float, keep_alive_seconds: float) -> None:
        self._pipeline = pipeline
        self._stall_seconds = stall_seconds
        self._keep_alive_seconds = keep_alive_seconds
        self._told: set[str] = set()
        """Types of tools whose first absence was logged, at most _MAX_TOLD."""

    async def write(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        """Answer ``request``; its client can cancel it meanwhile. Raises KvbatonError."""
        let_client_cancel(request)
        write = self._write_events if exchange.options.stream else self._write_whole
        with exchange.naming_fields():
            return await write(request, exchange)

    async def _write_whole(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        found = _Collected()
        async with self._pipeline.generate(*exchange.requests, sink=found) as deltas:
            async for delta in deltas:
                found.put(delta)
            headers = {**server_timing(request, found.deltas), **self._left_out(exchange)}
            return json_bytes(await exchange.whole(found.deltas), headers)

    async def _write_events(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        headers = {**request_id_header(request), **self._left_out(exchange)}
        stream = exchange.open_stream(request, headers, self._stall_seconds)
        sink = _Sent(stream, exchange.formatter)
        request[STREAM] = stream
        with KeepAlive(stream, self._keep_alive_seconds):
            async with self._pipeline.generate(*exchange.requests, sink=sink) as deltas:
                async for delta in deltas:
                    if chunks := exchange.formatter.chunks(delta):
                        await stream.send(chunks)
                await stream.done()
        del request[STREAM]  # a cycle of references would wait for the search for garbage
        return stream.response

    def _left_out(self, exchange: Exchange) -> dict[str, str]:
        """Return the header that names the tools that were left out; log each type once."""
        if not exchange.left_out:
            return {}
        kinds = [_UNSAFE.sub("?", kind) for kind in exchange.left_out[:_MAX_NAMED]]
        for kind in kinds:
            if kind not in self._told and len(self._told) < _MAX_TOLD:
                self._told.add(kind)
                logger.info("tools of the type %s cannot run here and are left out of requests", kind)
        return {LEFT_OUT: ", ".join(kinds)}


class _Collected:
    """The deltas of an answer that is not streamed."""

    has_room = True

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def put(self, delta: Delta) -> None:
        """Add a delta."""
        self.deltas.append(delta)


class _Sent:
    """The deltas of a stream that its connection takes at once."""

    def __init__(self, stream: EventStream, formatter: AnswerFormatter) -> None:
        self._stream = stream
        self._formatter = formatter

    @property
    def has_room(self) -> bool:
        """True if the headers were sent and nothing waits for the client."""
        return self._stream.has_room

    def put(self, delta: Delta) -> None:
        """Write the events of a delta."""
        if chunks := self._formatter.chunks(delta):
            self._stream.send_now(chunks)


def json_bytes(whole: bytes, headers: Mapping[str, str]) -> web.Response:
    """Return a response whose body is this JSON, without decoding and encoding it again."""
    return web.Response(body=whole, headers={"Content-Type": "application/json; charset=utf-8", **headers})
