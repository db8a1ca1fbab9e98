"""The bodies of /v1/messages and /v1/messages/count_tokens, parsed into the requests of chats."""

import time
from functools import partial
from typing import Any

from contract.errors import InvalidRequestError
from router.http.bodies.body import Body
from router.http.exchange import AnswerOptions, Exchange, Origin
from router.http.fields.chat import forced_calls, template_kwargs
from router.http.fields.grammars import grammar_fields
from router.http.fields.offered_tools import OfferedTools, refuse_left_out
from router.http.fields.sampling import sampling_fields
from router.http.fields.unsupported import NEUTRAL, OPENAI_NEUTRAL, reject_unless_neutral
from router.http.messages.conversation import conversation_of, is_continued
from router.http.messages.formatter import MessageFormatter
from router.http.schema.notation import INT31
from router.http.streaming import NamedEventStream
from router.intake.model_source import ModelSource
from router.intake.request import GenerationRequest
from text.chat import Chat
from text.tools import Tool, ToolChoice, check_function_name

_SUPPORTED = ("system", "tools", "tool_choice", "stop_sequences")
MESSAGE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: idle for name, idle in NEUTRAL.items() if name not in _SUPPORTED},
    **OPENAI_NEUTRAL,
    "container": (),
    "mcp_servers": ([],),
    "stream_options": (),
    "input": (),
}
"""``NEUTRAL`` of this API: also the fields of OpenAI's APIs that have other names here."""
_THINKS = {"enabled": True, "adaptive": True, "disabled": False}
_CHOICES = ("auto", "any", "tool", "none")
_PING = b'event: ping\ndata: {"type": "ping"}\n\n'


class MessageParser:
    """Parses messages for the model of ``models``."""

    def __init__(self, models: ModelSource) -> None:
        self._models = models

    def message(self, body: Body, origin: Origin) -> Exchange:
        """Parse the body of a message. Raises KvbatonError."""
        body.object("metadata")
        for name, value in body.fields.items():
            if (neutral := MESSAGE_NEUTRAL.get(name)) is not None:
                reject_unless_neutral(name, value, neutral)
        offered = message_tools(body)
        chat = _chat_of(body, offered)
        max_tokens = body.integer_within("max_tokens", 1, INT31)
        if max_tokens is None:
            raise InvalidRequestError("max_tokens is missing", param="max_tokens")
        sampling = sampling_fields(body)
        # both names are accepted, as clients of the two APIs write them
        stop = (*sampling.pop("stop", ()), *body.strings("stop_sequences"))
        format_field = "output_config.format"
        if body.get("output_format") is not None:
            if body.object("output_config").get("format") is not None:
                raise InvalidRequestError(
                    "output_format cannot be combined with output_config.format", param="output_format"
                )
            format_field = "output_format"  # its older name
        fields = {**sampling, "stop": stop, **grammar_fields(body, format_field)}
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


def message_tools(body: Body) -> OfferedTools:
    """Return ``tools`` in the format of chat templates, with the keys in the client's order; the choice is not read yet.

    Tools of other types than "custom" are left out: they run at their provider, or have no schema.
    Raises InvalidRequestError that names the wrong tool.
    """
    raw = body.get("tools")
    if raw is None:
        return OfferedTools()
    if not isinstance(raw, list):
        raise InvalidRequestError("tools must be a list of tools", param="tools")
    tools = []
    left_out: dict[str, None] = {}
    for index, tool in enumerate(raw):
        kind = tool.get("type") if isinstance(tool, dict) else None
        # a tool that Anthropic runs itself; the request is answered without it
        if isinstance(kind, str) and kind != "custom":
            left_out[kind[:40]] = None
        else:
            tools.append(_tool(tool, f"tools[{index}]"))
    refuse_left_out(body, tuple(left_out))
    return OfferedTools(tools=tuple(tools), left_out=tuple(left_out))


def _tool(raw: Any, where: str) -> Tool:
    if not isinstance(raw, dict) or raw.get("type") not in (None, "custom"):
        raise InvalidRequestError(f"{where} must be an object with name and input_schema", param=where)
    check_function_name(raw.get("name"), f"{where}.name")
    if not isinstance(raw.get("input_schema"), dict):
        raise InvalidRequestError(
            f"{where}.input_schema must be a JSON schema", param=f"{where}.input_schema"
        )
    if not isinstance(raw.get("description", ""), str | None):
        raise InvalidRequestError(f"{where}.description must be a string", param=f"{where}.description")
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    function = {names[key]: value for key, value in raw.items() if key in names and value is not None}
    return {"type": "function", "function": function}


def message_tool_choice(body: Body, offered: OfferedTools) -> tuple[ToolChoice, bool]:
    """Return ``tool_choice``, and True if several calls are allowed. Raises InvalidRequestError."""
    tools = offered.tools
    missing = f" (left out: {', '.join(offered.left_out)[:200]})" if offered.left_out else ""
    raw = body.object("tool_choice")
    if not raw.fields:
        return ToolChoice("auto" if tools else "none"), True
    kind = raw.string("type")
    name = raw.string("name")
    parallel = not raw.flag("disable_parallel_tool_use")
    if kind not in _CHOICES:
        raise InvalidRequestError(
            f"tool_choice.type is {str(kind)[:40]!r}; choose one of {', '.join(_CHOICES)}",
            param="tool_choice.type",
        )
    if kind in ("any", "tool") and not tools:
        raise InvalidRequestError(
            f"tool_choice forces a call, but there are no tools that can run here{missing}",
            param="tool_choice",
        )
    if kind == "tool":
        check_function_name(name, "tool_choice.name")
        if name not in [tool["function"]["name"] for tool in tools]:
            raise InvalidRequestError(
                f"tool_choice.name is {name!r}, which is not one of the tools{missing}",
                param="tool_choice.name",
            )
        return ToolChoice("function", name), parallel
    if kind == "any":
        return ToolChoice("required"), parallel
    return ToolChoice("none" if kind == "none" or not tools else "auto"), parallel


def message_template_kwargs(body: Body) -> dict[str, Any]:
    """Return the template's variables from ``thinking``, ``output_config.effort`` and ``chat_template_kwargs``.

    Raises InvalidRequestError.
    """
    effort = body.object("output_config").get("effort")
    variables = template_kwargs(body, effort=effort, prefix=("output_config.", ""))
    thinking = body.object("thinking")
    if not thinking.fields:
        return variables
    kind = thinking.string("type")
    if kind not in _THINKS:
        raise InvalidRequestError(
            f"thinking.type is {str(kind)[:40]!r}; choose one of {', '.join(_THINKS)}",
            param="thinking.type",
        )
    thinks = {"enable_thinking": _THINKS[kind], "thinking": _THINKS[kind]}
    return {**variables, **thinks, **body.object("chat_template_kwargs").fields}
