"""The bodies of /v1/messages and /v1/messages/count_tokens, parsed into the requests of chats."""

import time
from functools import partial
from typing import Any

from contract.errors import InvalidRequestError
from router.http.bodies.body import Body
from router.http.exchange import Exchange, Origin
from router.http.fields.chat import forced_calls
from router.http.fields.grammars import grammar_fields
from router.http.fields.offered_tools import OfferedTools
from router.http.fields.sampling import sampling_fields
from router.http.formatter import AnswerOptions
from router.http.messages.conversation import conversation_of, is_continued
from router.http.messages.fields import (
    message_template_kwargs,
    message_tool_choice,
    message_tools,
    reject_unsupported_message,
)
from router.http.messages.formatter import MessageFormatter
from router.http.schema.notation import INT31
from router.http.streaming import NamedEventStream
from router.intake.model_source import ModelSource
from router.intake.request import GenerationRequest
from text.chat import Chat

_PING = b'event: ping\ndata: {"type": "ping"}\n\n'


class MessageParser:
    """Parses messages for the model of ``models``."""

    def __init__(self, models: ModelSource) -> None:
        self._models = models

    def message(self, body: Body, origin: Origin) -> Exchange:
        """Parse the body of a message. Raises KvbatonError."""
        reject_unsupported_message(body)
        offered = message_tools(body)
        chat = _chat_of(body, offered)
        max_tokens = body.integer_within("max_tokens", 1, INT31)
        if max_tokens is None:
            raise InvalidRequestError("max_tokens is missing", param="max_tokens")
        sampling = sampling_fields(body)
        stop = (*sampling.pop("stop", ()), *body.strings("stop_sequences"))
        fields = {**sampling, "stop": stop, **_format_fields(body)}
        request = GenerationRequest(
            request_id=origin.request_id,
            prompt=chat,
            max_tokens=max_tokens,
            tenant=origin.tenant,
            arrival=origin.arrival,
            **forced_calls(chat, fields),
        )
        options = AnswerOptions(
            request_id=origin.request_id,
            model=request.model or self._models.card().name,
            created=int(time.time()),
            stream=body.flag("stream"),
            timings=body.flag("timings"),
        )
        return Exchange(
            requests=[request],
            options=options,
            formatter=MessageFormatter(options, max_tokens),
            open_stream=partial(NamedEventStream, lambda error: [error], keep_alive=_PING),
            left_out=offered.left_out,
        )

    def count(self, body: Body, origin: Origin) -> GenerationRequest:
        """Parse the body of a count. Raises KvbatonError."""
        return GenerationRequest(
            request_id=origin.request_id,
            prompt=_chat_of(body, message_tools(body)),
            model=body.string("model"),
            tenant=origin.tenant,
            arrival=origin.arrival,
        )


def _chat_of(body: Body, offered: OfferedTools) -> Chat:
    choice, parallel = message_tool_choice(body, offered)
    messages = conversation_of(body)
    continues = is_continued(messages)
    return Chat(
        messages=messages,
        tools=() if choice.mode == "none" else offered.tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        template_kwargs=message_template_kwargs(body),
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def _format_fields(body: Body) -> dict[str, Any]:
    """Read the grammar in ``output_config.format``, or in its older name ``output_format``."""
    name = "output_config.format" if body.get("output_format") is None else "output_format"
    if name == "output_format" and body.object("output_config").get("format") is not None:
        raise InvalidRequestError("output_format cannot be combined with output_config.format", param=name)
    return grammar_fields(body, name)
