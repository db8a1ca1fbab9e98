"""The handler of the endpoints that answer with text: it reads a body, and writes one JSON object or a stream of events."""

import logging
import re
import time
from collections.abc import Mapping

from aiohttp import web

from router.answers.answer import Delta
from router.http.bodies.json_bodies import JsonBodyReader
from router.http.boundary import STREAM, let_client_cancel, origin_of, request_id_header
from router.http.endpoints import Endpoint
from router.http.exchange import AnswerFormatter, Exchange, NamingFields
from router.http.streaming import EventStream, KeepAlive
from router.pipeline import Pipeline

logger = logging.getLogger(__name__)

LEFT_OUT = "x-kvbaton-tools-left-out"
"""Header of a response: the types of the request's tools that cannot run here."""
_MAX_NAMED = 16
_MAX_TOLD = 64
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_PARTS = (
    *("queue", "intake", "placement", "worker", "engine_queue", "messages"),
    *("prefill", "transfer", "first_decode_step", "decode", "end_to_end"),
)


class AnswerWriter:
    """Sends the requests of bodies through the pipeline and writes their answers.

    stall_seconds: how long a client may read nothing of a stream. keep_alive_seconds: see ``KeepAlive``.
    """

    def __init__(
        self, bodies: JsonBodyReader, pipeline: Pipeline, stall_seconds: float, keep_alive_seconds: float
    ) -> None:
        self._bodies = bodies
        self._pipeline = pipeline
        self._stall_seconds = stall_seconds
        self._keep_alive_seconds = keep_alive_seconds
        self._told: set[str] = set()
        """Types of tools whose first absence was logged, at most _MAX_TOLD."""

    async def answer(self, endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
        """Answer ``request`` as ``endpoint`` does; its client can cancel it once its body is read. Raises KvbatonError."""
        # before the body arrives: a slow client's time counts as the request's own
        arrival = time.monotonic()
        body = await self._bodies.read(request, endpoint.id_prefix, endpoint.schema)
        exchange = endpoint.parse(body, origin_of(request, arrival))
        let_client_cancel(request)
        with NamingFields(exchange):
            if not exchange.options.stream:
                found = _Collected()
                async with self._pipeline.generate(*exchange.requests, sink=found) as deltas:
                    async for delta in deltas:
                        found.put(delta)
                    # behind the last delta, which has the timings
                    headers = {**server_timing(request, found.deltas), **self._left_out(exchange)}
                    return json_bytes(await exchange.whole(found.deltas), headers)
            headers = {**request_id_header(request), **self._left_out(exchange)}
            stream = exchange.open_stream(request, headers, self._stall_seconds)
            sink = _Sent(stream, exchange.formatter)
            request[STREAM] = stream
            with KeepAlive(stream, self._keep_alive_seconds):
                async with self._pipeline.generate(*exchange.requests, sink=sink) as deltas:
                    async for delta in deltas:
                        if chunks := exchange.formatter.chunks(delta):
                            await stream.send(chunks)
                    await stream.end()
            del request[STREAM]  # a cycle of references would wait for the search for garbage
            return stream.response

    def _left_out(self, exchange: Exchange) -> dict[str, str]:
        """Return the header that names the tools that were left out; log each type once."""
        if not exchange.left_out:
            return {}
        # a type is text of the client, and goes into a header and into the log
        kinds = [_UNSAFE.sub("?", kind) for kind in exchange.left_out[:_MAX_NAMED]]
        for kind in kinds:
            # a client may invent types without end: neither the log nor this set may grow with them
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


def server_timing(request: web.Request, deltas: list[Delta]) -> dict[str, str]:
    """Return ``Server-Timing`` in milliseconds for the slowest answer, if ``x-kvbaton-timings: true`` asks for it."""
    if request.headers.get("x-kvbaton-timings", "").lower() not in ("true", "1"):
        return {}
    timings = [delta.timings.as_dict() for delta in deltas if delta.timings]
    # the client waits for the slowest of its answers
    longest = max(timings, key=lambda one: float(one["end_to_end"]), default=None)
    if longest is None:
        return {}
    return {"Server-Timing": ", ".join(f"{part};dur={longest[part] * 1000:.3f}" for part in _PARTS)}
