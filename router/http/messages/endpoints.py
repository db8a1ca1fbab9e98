"""POST /v1/messages and /v1/messages/count_tokens."""

import time

from aiohttp import web

from router.http.answer_writer import AnswerWriter
from router.http.bodies.json_bodies import JsonBodyReader
from router.http.boundary import origin_of
from router.http.messages.parser import MessageParser
from router.http.schema.messages import COUNT, MESSAGE
from router.pipeline import Pipeline


class MessageEndpoints:
    """Handlers of messages. They are stateless."""

    def __init__(
        self, bodies: JsonBodyReader, answers: AnswerWriter, pipeline: Pipeline, parser: MessageParser
    ) -> None:
        self._bodies = bodies
        self._answers = answers
        self._pipeline = pipeline
        self._parser = parser

    def routes(self) -> list[web.RouteDef]:
        """Return both paths."""
        return [
            web.post("/v1/messages", self.create),
            web.post("/v1/messages/count_tokens", self.count),
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages."""
        arrival = time.monotonic()
        body = await self._bodies.read(request, "msg_", MESSAGE)
        return await self._answers.write(request, self._parser.message(body, origin_of(request, arrival)))

    async def count(self, request: web.Request) -> web.Response:
        """POST /v1/messages/count_tokens."""
        arrival = time.monotonic()
        body = await self._bodies.read(request, "count_", COUNT)
        counted = self._parser.count(body, origin_of(request, arrival))
        return web.json_response({"input_tokens": await self._pipeline.preparer.num_prompt_tokens(counted)})
