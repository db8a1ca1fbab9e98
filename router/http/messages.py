"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API over the pipeline of chats, stateless."""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from aiohttp import web

from contract.errors import InvalidRequestError
from router.http.body import Body
from router.http.boundary import origin_of
from router.http.chat_fields import forced_calls
from router.http.exchange import Exchange, Origin
from router.http.fields import sampling_fields
from router.http.grammars import grammar_fields
from router.http.messages_fields import (
    message_template_kwargs,
    message_tool_choice,
    message_tools,
    refuse_unserved_message,
)
from router.http.messages_input import conversation_of, is_continued
from router.http.messages_schema import COUNT, MESSAGE
from router.http.messages_shape import MessageShape
from router.http.shapes import AnswerOptions
from router.http.streaming import NamedEventStream
from router.http.tokenizing import ReadBody
from router.model_source import ModelSource
from router.request import GenerationRequest
from text.chat import Chat

_INT31 = 2**31 - 1
WriteAnswer = Callable[[web.Request, Exchange], Awaitable[web.StreamResponse]]
"""Sends the requests of an exchange through the pipeline and writes what comes back, whole or as a stream."""
CountTokens = Callable[[GenerationRequest], Awaitable[int]]
"""Tells how many tokens a request's prompt has."""


class MessageEndpoints:
    """Owns nothing."""

    def __init__(
        self,
        read_body: ReadBody,
        write_answer: WriteAnswer,
        count_tokens: CountTokens,
        bodies: "MessageBodies",
    ) -> None:
        self._read_body = read_body
        self._write_answer = write_answer
        self._count_tokens = count_tokens
        self._bodies = bodies

    def routes(self) -> list[web.RouteDef]:
        """Return both paths."""
        return [
            web.post("/v1/messages", self.create),
            web.post("/v1/messages/count_tokens", self.count),
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Answer ``messages``."""
        arrival = time.monotonic()
        body = await self._read_body(request, "msg_", MESSAGE)
        return await self._write_answer(request, self._bodies.message(body, origin_of(request, arrival)))

    async def count(self, request: web.Request) -> web.Response:
        """Count the tokens of ``messages`` in the model's chat template."""
        arrival = time.monotonic()
        body = await self._read_body(request, "count_", COUNT)
        asked = self._bodies.counted(body, origin_of(request, arrival))
        return web.json_response({"input_tokens": await self._count_tokens(asked)})


class MessageBodies:
    """Owns nothing."""

    def __init__(self, models: ModelSource) -> None:
        self._models = models

    def message(self, body: Body, origin: Origin) -> Exchange:
        """Read the body of a message. Raises KvbatonError."""
        refuse_unserved_message(body)
        chat = _chat_of(body)
        max_tokens = body.integer_within("max_tokens", 1, _INT31)
        if max_tokens is None:
            raise InvalidRequestError("max_tokens is missing", param="max_tokens")
        sampled = sampling_fields(body)
        stop = (*sampled.pop("stop"), *body.strings("stop_sequences"))
        fields = {**sampled, "stop": stop, **_format_fields(body)}
        asked = GenerationRequest(
            request_id=origin.request_id,
            prompt=chat,
            default_max_tokens=max_tokens,
            tenant=origin.tenant,
            arrival=origin.arrival,
            **forced_calls(chat, fields),
        )
        options = AnswerOptions(
            request_id=origin.request_id,
            model=asked.model or self._models.card().name,
            created=int(time.time()),
            stream=body.flag("stream"),
            timings=body.flag("timings"),
        )
        return Exchange(
            requests=[asked],
            options=options,
            shape=MessageShape(options, max_tokens),
            open_stream=partial(NamedEventStream, lambda error: [error]),
        )

    def counted(self, body: Body, origin: Origin) -> GenerationRequest:
        """Read the body of a count. Raises KvbatonError."""
        return GenerationRequest(
            request_id=origin.request_id,
            prompt=_chat_of(body),
            model=body.string("model"),
            tenant=origin.tenant,
            arrival=origin.arrival,
        )


def _chat_of(body: Body) -> Chat:
    tools = message_tools(body)
    choice, parallel = message_tool_choice(body, tools)
    messages = conversation_of(body)
    continues = is_continued(messages)
    return Chat(
        messages=messages,
        tools=() if choice.mode == "none" else tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        template_kwargs=message_template_kwargs(body),
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def _format_fields(body: Body) -> dict[str, Any]:
    """Return the grammar of ``output_config.format``, or of ``output_format``, its older name."""
    name = "output_config.format" if body.get("output_format") is None else "output_format"
    if name == "output_format" and body.object("output_config").get("format") is not None:
        raise InvalidRequestError("output_format stands beside output_config.format", param=name)
    return grammar_fields(body, name)
