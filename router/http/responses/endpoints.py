"""POST /v1/responses."""

import time

from aiohttp import web

from router.http.answer_writer import AnswerWriter
from router.http.bodies.json_bodies import JsonBodyReader
from router.http.boundary import origin_of
from router.http.responses.parser import ResponseParser
from router.http.schema.responses import RESPONSE


class ResponseEndpoints:
    """Handlers of responses. Nothing is stored between two requests."""

    def __init__(self, bodies: JsonBodyReader, answers: AnswerWriter, parser: ResponseParser) -> None:
        self._bodies = bodies
        self._answers = answers
        self._parser = parser

    def routes(self) -> list[web.RouteDef]:
        """Return the path."""
        return [web.post("/v1/responses", self.create)]

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        arrival = time.monotonic()
        body = await self._bodies.read(request, "resp_", RESPONSE)
        return await self._answers.write(request, self._parser.response(body, origin_of(request, arrival)))
