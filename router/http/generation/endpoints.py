"""POST /v1/chat/completions and /v1/completions."""

import time

from aiohttp import web

from router.http.answer_writer import AnswerWriter
from router.http.bodies.json_bodies import JsonBodyReader
from router.http.boundary import origin_of
from router.http.generation.parser import GenerationParser
from router.http.schema.chat import CHAT
from router.http.schema.completion import COMPLETION


class GenerationEndpoints:
    """Handlers of chats and text completions."""

    def __init__(self, bodies: JsonBodyReader, answers: AnswerWriter, parser: GenerationParser) -> None:
        self._bodies = bodies
        self._answers = answers
        self._parser = parser

    def routes(self) -> list[web.RouteDef]:
        """Return both paths."""
        return [
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        arrival = time.monotonic()
        body = await self._bodies.read(request, "chatcmpl", CHAT)
        return await self._answers.write(request, self._parser.chat(body, origin_of(request, arrival)))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        arrival = time.monotonic()
        body = await self._bodies.read(request, "cmpl", COMPLETION)
        return await self._answers.write(request, self._parser.completion(body, origin_of(request, arrival)))
