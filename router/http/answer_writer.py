"""The answer to an exchange, written to its client as one JSON object or as a stream of events."""

from collections.abc import Mapping

from aiohttp import web

from router.answer import Delta
from router.http.boundary import STREAM, request_id_header
from router.http.exchange import Exchange
from router.http.formatter import AnswerFormatter
from router.http.keep_alive import KeepAlive
from router.http.lifetime import let_client_cancel
from router.http.streaming import EventStream
from router.http.timing_header import server_timing
from router.pipeline import Pipeline


class AnswerWriter:
    """Sends the requests of exchanges through the pipeline and writes their answers.

    stall_seconds: how long a client may read nothing of a stream. keep_alive_seconds: see ``KeepAlive``.
    """

    def __init__(self, pipeline: Pipeline, stall_seconds: float, keep_alive_seconds: float) -> None:
        self._pipeline = pipeline
        self._stall_seconds = stall_seconds
        self._keep_alive_seconds = keep_alive_seconds

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
            return json_bytes(await exchange.whole(found.deltas), server_timing(request, found.deltas))

    async def _write_events(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        stream = exchange.open_stream(request, request_id_header(request), self._stall_seconds)
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
