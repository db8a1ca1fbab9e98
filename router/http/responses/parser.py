"""The body of /v1/responses, parsed into the request of a chat."""

import time
from functools import partial

from contract.errors import InvalidRequestError
from router.http.bodies.body import Body
from router.http.exchange import Exchange, Origin
from router.http.fields.chat import forced_calls
from router.http.fields.grammars import grammar_fields
from router.http.fields.offered_tools import offered_tools
from router.http.fields.sampling import sampling_fields
from router.http.formatter import AnswerOptions
from router.http.generation.logprobs import ChatLogprobs
from router.http.responses.conversation import response_chat
from router.http.responses.fields import echoed_fields, reject_unsupported_response, response_logprobs
from router.http.responses.formatter import ResponseFormatter
from router.http.schema.notation import INT31
from router.http.streaming import NamedEventStream
from router.intake.model_source import ModelSource
from router.intake.request import GenerationRequest

_NAMES = {"messages": "input", "max_tokens": "max_output_tokens"}
"""Field of a chat → the same field here."""


class ResponseParser:
    """Parses responses for the model of ``models``."""

    def __init__(self, models: ModelSource) -> None:
        self._models = models

    def response(self, body: Body, origin: Origin) -> Exchange:
        """Parse the body of a response. Raises KvbatonError."""
        reject_unsupported_response(body)
        offered = offered_tools(body, is_flat=True)
        chat = response_chat(body, offered)
        fields = {**sampling_fields(body), **grammar_fields(body, "text.format")}
        request = GenerationRequest(
            request_id=origin.request_id,
            prompt=chat,
            max_tokens=body.integer_within("max_output_tokens", 1, INT31),
            logprobs=response_logprobs(body),
            tenant=origin.tenant,
            arrival=origin.arrival,
            **forced_calls(chat, fields),
        )
        options = self._options(request, body)
        card = self._models.card()
        entry = ChatLogprobs(card.tokenizer).entry
        formatter = ResponseFormatter(
            options,
            echoed_fields(body, card),
            (lambda tokens: entry(tokens)["content"]) if options.logprobs else None,
            offered,
        )
        return Exchange(
            requests=[request],
            options=options,
            formatter=formatter,
            open_stream=partial(NamedEventStream, formatter.failed),
            field_names=_NAMES,
            left_out=offered.left_out,
        )

    def _options(self, request: GenerationRequest, body: Body) -> AnswerOptions:
        stream = body.flag("stream")
        if body.get("stream_options") is not None and not stream:
            raise InvalidRequestError("stream_options is allowed with stream only", param="stream_options")
        body.object("stream_options").flag("include_obfuscation")
        return AnswerOptions(
            request_id=request.request_id,
            model=request.model or self._models.card().name,
            created=int(time.time()),
            stream=stream,
            logprobs=request.logprobs is not None,
            timings=body.flag("timings"),
        )
