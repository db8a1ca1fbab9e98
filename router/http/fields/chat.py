"""The fields of a chat: messages, tools, and the variables of the chat template, such as the reasoning effort."""

import json
from typing import Any

from contract.errors import InvalidRequestError
from contract.json_schema import MAX_SCHEMA_BYTES, plain_schema, reduced
from contract.sampling import Grammar
from router.http.bodies.body import Body
from router.http.fields.offered_tools import OfferedTools, read_tools
from text.chat import RESERVED, Chat, drop_transport_lines, parse_messages
from text.parsing.forced import forced_calls_schema
from text.tools import Tool

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITIES = ("low", "medium", "high")
MAX_TOOLS = 4096
"""Most functions when ``tool_choice`` forces a call."""
CHAT_FIELDS = (
    *("tools", "tool_choice", "parallel_tool_calls", "documents", "add_generation_prompt"),
    *("continue_final_message", "reasoning_effort", "verbosity"),
)
"""Fields that chats support and text completions do not."""


def chat_of(body: Body, offered: OfferedTools | None = None) -> Chat:
    """Read the conversation. With tool_choice "none" the tools are not shown to the model.

    offered: the body's tools, if they were read already. Raises InvalidRequestError, UnsupportedFieldError.
    """
    offered = offered or read_tools(body)
    continues = body.flag("continue_final_message")
    # a message that is continued has its header already
    has_header = body.flag("add_generation_prompt", default=not continues)
    if continues and has_header:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    documents = [] if body.get("documents") is None else body.get("documents")
    if not isinstance(documents, list) or not all(isinstance(document, dict) for document in documents):
        raise InvalidRequestError("documents must be a list of objects", param="documents")
    return Chat(
        messages=drop_transport_lines(parse_messages(body.get("messages"))),
        tools=offered.shown,
        tool_choice=offered.choice,
        parallel_tool_calls=body.flag("parallel_tool_calls", default=True),
        documents=tuple(documents),
        template_kwargs=template_kwargs(
            body, effort=body.get("reasoning_effort"), verbosity=body.get("verbosity")
        ),
        add_generation_prompt=has_header,
        continue_final_message=continues,
    )


def forced_calls(chat: Chat, fields: dict[str, Any]) -> dict[str, Any]:
    """Return ``fields``; if tool_choice forces a call, with the grammar of such calls.

    Raises InvalidRequestError if the client has sent another grammar too.
    """
    if not chat.tool_choice.is_forced:
        return fields
    if fields.get("grammar"):
        raise InvalidRequestError(
            f"tool_choice forces a call, but {fields['grammar_field']} asks for an answer of another form",
            param="tool_choice",
        )
    admits = chat.tool_choice.admits
    # of the tools that may be called only: the others need not even have schemas that can be enforced
    admitted = [tool["function"] for tool in chat.tools if admits(tool["function"]["name"])]
    # their schemas would take too long to reduce, however small the result is
    if len(admitted) > MAX_TOOLS:
        raise InvalidRequestError(
            f"tools has {len(admitted)} functions; if tool_choice forces a call the limit is {MAX_TOOLS}",
            param="tools",
        )
    num_bytes = sum(len(json.dumps(function.get("parameters"))) for function in admitted)
    if num_bytes > MAX_SCHEMA_BYTES:
        raise InvalidRequestError(
            f"the parameters of the tools have {num_bytes} bytes with their annotations; if tool_choice forces a call "
            f"the limit is {MAX_SCHEMA_BYTES}",
            param="tools",
        )
    tools = [
        _with_plain_parameters(tool, index) if admits(tool["function"]["name"]) else tool
        for index, tool in enumerate(chat.tools)
    ]
    schema = forced_calls_schema(tools, chat.tool_choice, chat.parallel_tool_calls)
    grammar = reduced(Grammar("json_schema", json.dumps(schema)))
    grammar.check()
    return {**fields, "grammar": grammar, "grammar_field": "tool_choice"}


def _with_plain_parameters(tool: Tool, index: int) -> Tool:
    """Drop the constraints that cannot be enforced from the parameters' schema; with ``strict`` raise an error instead."""
    function = tool["function"]
    parameters = function.get("parameters")
    if not isinstance(parameters, dict):
        return tool
    is_strict = function.get("strict") is True
    try:
        plain = plain_schema(json.dumps(parameters), is_lenient=not is_strict)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"tools[{index}].function.parameters: {error.message}", param="tools"
        ) from error
    return {**tool, "function": {**function, "parameters": json.loads(plain)}}


def template_kwargs(
    body: Body, *, effort: Any = None, verbosity: Any = None, prefix: tuple[str, str] = ("reasoning_", "")
) -> dict[str, Any]:
    """Return the template's variables: ``chat_template_kwargs``, and those for effort and verbosity.

    prefix: the beginnings of the names of the fields that effort and verbosity were read from.
    Raises InvalidRequestError for a variable that cannot be set.
    """
    found = body.object("chat_template_kwargs").fields
    if taken := next((name for name in found if name in RESERVED), None):
        raise InvalidRequestError(
            f"chat_template_kwargs.{taken} cannot be set; these variables have their own fields, or belong to the model: "
            f"{', '.join(RESERVED)}",
            param=f"chat_template_kwargs.{taken}",
        )
    check_choice(f"{prefix[0]}effort", effort, EFFORTS)
    check_choice(f"{prefix[1]}verbosity", verbosity, VERBOSITIES)
    thinking: dict[str, Any] = {}
    if effort is not None:
        # templates read the first one (gpt-oss), the second (Qwen 3) or the third (DeepSeek V3.1), or none of them
        thinks = effort != "none"
        thinking |= {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
    if verbosity is not None:
        thinking["verbosity"] = verbosity
    # what the client has named itself wins
    return {**thinking, **found}


def check_choice(name: str, value: Any, known: tuple[str, ...]) -> None:
    """Raise InvalidRequestError that names the field, unless the value is null or one of ``known``."""
    if value is not None and value not in known:
        raise InvalidRequestError(
            f"{name} is {str(value)[:40]!r}; choose one of {', '.join(known)}", param=name
        )
