"""The body of /v1/responses, parsed into the request of a chat; its own fields are rejected or repeated in the response."""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from contract.errors import InvalidRequestError
from contract.sampling import MAX_LOGPROBS
from router.http.bodies.body import Body, Json
from router.http.exchange import AnswerOptions, Exchange, Origin
from router.http.fields.chat import check_choice, forced_calls
from router.http.fields.grammars import grammar_fields
from router.http.fields.offered_tools import read_tools
from router.http.fields.sampling import is_streamed, sampling_fields
from router.http.fields.unsupported import NEUTRAL, OPENAI_NEUTRAL, reject_unsupported
from router.http.generation.openai_formatter import ChatLogprobs
from router.http.responses.conversation import response_chat
from router.http.responses.formatter import ResponseFormatter
from router.http.schema.notation import INT31
from router.http.streaming import NamedEventStream
from router.intake.model_source import ModelSource
from router.intake.request import GenerationRequest
from text.model_card import ModelCard

INCLUDABLE = (
    *("message.output_text.logprobs", "reasoning.encrypted_content", "file_search_call.results"),
    *("web_search_call.results", "web_search_call.action.sources", "code_interpreter_call.outputs"),
    *("computer_call_output.output.image_url", "message.input_image.image_url"),
)
"""The first one adds log probabilities; the others concern items that no response of this service contains."""
_SUPPORTED = ("tools", "tool_choice", "parallel_tool_calls", "text", "instructions", "max_output_tokens")
SUMMARIES = ("auto", "concise", "detailed")
"""Accepted, but no summary is made: reasoning is shown in full."""
TRUNCATIONS = ("disabled", "auto")
"""Accepted, but an input is never truncated: one that is too long is rejected."""
RESPONSE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: idle for name, idle in NEUTRAL.items() if name not in _SUPPORTED},
    **OPENAI_NEUTRAL,
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "max_tool_calls": (),
    "context_management": ([],),
    "moderation": (),
    "messages": (),
    "max_tokens": (),
}
"""``NEUTRAL`` of this API: also the fields of chats that have other names here."""
_ECHOED = ("instructions", "max_output_tokens", "prompt_cache_key", "safety_identifier", "user")
_NAMES = {"messages": "input", "max_tokens": "max_output_tokens"}
"""Field of a chat → the same field here."""


class ResponseParser:
    """Parses responses for the model of ``models``."""

    def __init__(self, models: ModelSource) -> None:
        self._models = models

    def response(self, body: Body, origin: Origin) -> Exchange:
        """Parse the body of a response. Raises KvbatonError."""
        reject_unsupported(body, known=RESPONSE_NEUTRAL)
        check_choice("truncation", body.get("truncation"), TRUNCATIONS)
        reasoning = body.object("reasoning")
        for name in ("summary", "generate_summary"):
            check_choice(f"reasoning.{name}", reasoning.get(name), SUMMARIES)
        offered = read_tools(body, is_flat=True)
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
        stream = is_streamed(body)
        body.object("stream_options").flag("include_obfuscation")
        return AnswerOptions(
            request_id=request.request_id,
            model=request.model or self._models.card().name,
            created=int(time.time()),
            stream=stream,
            logprobs=request.logprobs is not None,
            timings=body.flag("timings"),
        )


def response_logprobs(body: Body) -> int | None:
    """Read the number of alternatives of each token; None: no log probabilities. Raises InvalidRequestError."""
    include = body.get("include")
    if include is not None and not isinstance(include, list):
        raise InvalidRequestError("include must be a list of strings", param="include")
    for index, name in enumerate(include or ()):
        if name not in INCLUDABLE:
            raise InvalidRequestError(
                f"include[{index}] is {str(name)[:60]!r}; choose one of {', '.join(INCLUDABLE)}",
                param=f"include[{index}]",
            )
    top = body.integer_within("top_logprobs", 0, MAX_LOGPROBS)
    # either field alone asks for them
    return top or 0 if top or INCLUDABLE[0] in (include or ()) else None


def echoed_fields(body: Body, card: ModelCard) -> Json:
    """Return the fields that a response repeats from its request, with defaults filled in."""
    fields = body.fields
    text: Mapping[str, Any] = fields.get("text") or {}
    reasoning = body.object("reasoning")
    temperature = body.number("temperature")
    top_p = body.number("top_p")
    return {
        **{name: body.get(name) for name in _ECHOED},
        "metadata": body.get("metadata") or {},
        "temperature": card.defaults.temperature if temperature is None else temperature,
        "top_p": card.defaults.top_p if top_p is None else top_p,
        "tools": [_echoed_tool(tool) for tool in body.get("tools") or ()],
        "tool_choice": body.get("tool_choice") or "auto",
        "parallel_tool_calls": body.flag("parallel_tool_calls", default=True),
        "text": {
            "format": text.get("format") or {"type": "text"},
            "verbosity": text.get("verbosity") or "medium",
        },
        "reasoning": {name: reasoning.get(name) for name in ("effort", "summary")},
        "top_logprobs": body.get("top_logprobs") or 0,
        "truncation": "disabled",
        "service_tier": "default",
        "store": False,
        "background": False,
        "previous_response_id": None,
        "max_tool_calls": None,
    }


def _echoed_tool(tool: Json) -> Json:
    given = {name: value for name, value in tool.items() if value is not None}
    if given.get("type") != "function":
        return given
    return {
        "parameters": {"type": "object", "properties": {}},
        "description": None,
        "strict": False,
        **given,
    }
