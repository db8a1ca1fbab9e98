"""POST /v1/responses: OpenAI's Responses API over the pipeline of chats; nothing is stored between two requests."""

import time
from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web

from contract.errors import InvalidRequestError
from router.http.body import Body
from router.http.boundary import origin_of
from router.http.chat_fields import forced_calls
from router.http.exchange import Exchange, Origin
from router.http.fields import sampling_fields
from router.http.grammars import grammar_fields
from router.http.logprobs import ChatLogprobs
from router.http.response_fields import echoed_fields, refuse_unserved_response, response_logprobs
from router.http.response_input import response_chat
from router.http.response_shape import ResponseShape
from router.http.schema import RESPONSE
from router.http.shapes import AnswerOptions
from router.http.streaming import NamedEventStream
from router.http.tokenizing import ReadBody
from router.model_source import ModelSource
from router.request import GenerationRequest

_INT31 = 2**31 - 1
_NAMES = {"messages": "input", "max_tokens": "max_output_tokens"}
"""Field of a chat → the same field here."""
WriteAnswer = Callable[[web.Request, Exchange], Awaitable[web.StreamResponse]]
"""Sends the requests of an exchange through the pipeline and writes what comes back, whole or as a stream."""


class ResponseEndpoints:
    """Owns nothing."""

    def __init__(self, read_body: ReadBody, write_answer: WriteAnswer, bodies: "ResponseBodies") -> None:
        self._read_body = read_body
        self._write_answer = write_answer
        self._bodies = bodies

    def routes(self) -> list[web.RouteDef]:
        """The one path."""
        return [web.post("/v1/responses", self.create)]

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Answer ``input``."""
        arrival = time.monotonic()
        body = await self._read_body(request, "resp_", RESPONSE)
        return await self._write_answer(request, self._bodies.response(body, origin_of(request, arrival)))


class ResponseBodies:
    """Owns nothing."""

    def __init__(self, models: ModelSource) -> None:
        self._models = models

    def response(self, body: Body, origin: Origin) -> Exchange:
        """Read the body of a response. Raises KvbatonError."""
        refuse_unserved_response(body)
        chat = response_chat(body)
        fields = {**sampling_fields(body), **grammar_fields(body, "text.format")}
        asked = GenerationRequest(
            request_id=origin.request_id,
            prompt=chat,
            max_tokens=body.integer_within("max_output_tokens", 1, _INT31),
            logprobs=response_logprobs(body),
            tenant=origin.tenant,
            arrival=origin.arrival,
            **forced_calls(chat, fields),
        )
        options = self._options(asked, body)
        card = self._models.card()
        entry = ChatLogprobs(card.tokenizer).entry
        shape = ResponseShape(
            options,
            echoed_fields(body, card),
            (lambda tokens: entry(tokens)["content"]) if options.logprobs else None,
        )
        return Exchange(
            requests=[asked],
            options=options,
            shape=shape,
            open_stream=partial(NamedEventStream, shape.failed),
            field_names=_NAMES,
        )

    def _options(self, asked: GenerationRequest, body: Body) -> AnswerOptions:
        stream = body.flag("stream")
        if body.get("stream_options") is not None and not stream:
            raise InvalidRequestError("stream_options is allowed with stream only", param="stream_options")
        body.object("stream_options").flag("include_obfuscation")
        return AnswerOptions(
            request_id=asked.request_id,
            model=asked.model or self._models.card().name,
            created=int(time.time()),
            stream=stream,
            logprobs=asked.logprobs is not None,
            timings=body.flag("timings"),
        )
