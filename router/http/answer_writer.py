"""The answer to an exchange, written to its client as one JSON object or as a stream of events."""

from collections.abc import Mapping

from aiohttp import web

from router.http.boundary import STREAM, request_id_header
from router.http.exchange import Exchange
from router.http.lifetime import let_client_cancel
from router.http.timing_header import server_timing
from router.pipeline import Pipeline


class AnswerWriter:
    """Sends the requests of exchanges through the pipeline and writes their answers.

    stall_seconds: how long a client may read nothing of a stream.
    """

    def __init__(self, pipeline: Pipeline, stall_seconds: float) -> None:
        self._pipeline = pipeline
        self._stall_seconds = stall_seconds

    async def write(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        """Answer ``request``; its client can cancel it meanwhile. Raises KvbatonError."""
        let_client_cancel(request)
        async with exchange.deltas(self._pipeline) as deltas:
            if not exchange.options.stream:
                found = [delta async for delta in deltas]
                return json_bytes(await exchange.whole(found), server_timing(request, found))
            stream = exchange.open_stream(request, request_id_header(request), self._stall_seconds)
            request[STREAM] = stream
            async for delta in deltas:
                if chunks := exchange.formatter.chunks(delta):
                    await stream.send(chunks)
            await stream.done()
            return stream.response


def json_bytes(whole: bytes, headers: Mapping[str, str]) -> web.Response:
    """Return a response whose body is this JSON, without decoding and encoding it again."""
    return web.Response(body=whole, headers={"Content-Type": "application/json; charset=utf-8", **headers})
