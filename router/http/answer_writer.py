"""The answer to an exchange, written to its client as one JSON object or as a stream of events."""

from aiohttp import web

from router.cancellation import CancellableRequests
from router.http.access import authorization_of
from router.http.boundary import REQUEST_ID, STREAM, name_of, request_id_header
from router.http.exchange import Exchange
from router.http.timing_header import server_timing
from router.pipeline import Pipeline


class AnswerWriter:
    """Sends the requests of exchanges through the pipeline and writes their answers.

    stall_seconds: how long a client may read nothing of a stream.
    """

    def __init__(self, pipeline: Pipeline, running: CancellableRequests, stall_seconds: float) -> None:
        self._pipeline = pipeline
        self._running = running
        self._stall_seconds = stall_seconds

    async def write(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        """Answer ``request``; its client can cancel it meanwhile. Raises KvbatonError."""
        async with (
            self._running.open(authorization_of(request), request[REQUEST_ID], name_of(request)),
            exchange.deltas(self._pipeline) as deltas,
        ):
            if not exchange.options.stream:
                found = [delta async for delta in deltas]
                return web.json_response(
                    text=(await exchange.whole(found)).decode(), headers=server_timing(request, found)
                )
            stream = exchange.open_stream(request, request_id_header(request), self._stall_seconds)
            request[STREAM] = stream
            async for delta in deltas:
                if chunks := exchange.formatter.chunks(delta):
                    await stream.send(*chunks)
            await stream.done()
            return stream.response
