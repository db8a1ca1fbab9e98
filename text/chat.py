"""Chat messages → the prompt text of a model's chat template (jinja2, sandboxed).

The template sees what ``transformers`` gives it: ``messages``, ``add_generation_prompt``, ``bos_token``,
``eos_token``, ``tools``, ``documents``, the request's own variables, and the functions ``raise_exception``,
``strftime_now`` and the filter ``tojson``.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contract.errors import InvalidRequestError, SettingError, UnsupportedFieldError
from text.tools import AUTO, Tool, ToolChoice, parse_tool_calls

ROLES = ("system", "developer", "user", "assistant", "tool")
Message = dict[str, Any]
_PASSED_ON = ("name", "tool_call_id")
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
"""Variables of a template that a request sets by fields of their own, or not at all."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation to be answered, and what else the template is told.

    tools: what the model may call; none where it shall not know of them. parallel_tool_calls: it may call more than
    once. template_kwargs: more variables, none of RESERVED. add_generation_prompt: the prompt ends with the header of an
    answer. continue_final_message: it ends within the last message, which the answer goes on with; not both.
    """

    messages: list[Message]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = AUTO
    parallel_tool_calls: bool = True
    documents: tuple[dict[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def parse_messages(raw: Any) -> list[Message]:
    """Check a request's ``messages`` and bring every content into one string.

    Text parts are joined by newlines. Only an assistant's message with tool calls may lack content; the arguments of
    those become objects. Raises InvalidRequestError with the index of the message at fault.
    """
    if not isinstance(raw, list) or not raw:
        raise InvalidRequestError("messages must be a list with at least one message", param="messages")
    return [_parse_message(message, f"messages[{index}]") for index, message in enumerate(raw)]


def _parse_message(raw: Any, where: str) -> Message:
    if not isinstance(raw, dict):
        raise InvalidRequestError(f"{where} is no object with role and content", param=where)
    role = raw.get("role")
    if role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role is {role!r}; choose one of {', '.join(ROLES)}", param=f"{where}.role"
        )
    content = raw.get("content")
    if content is None:
        if role != "assistant" or not raw.get("tool_calls"):
            raise InvalidRequestError(f"{where}.content is missing", param=f"{where}.content")
        content = ""
    message = {"role": role, "content": _content_text(content, f"{where}.content")}
    message |= {
        name: _string(raw[name], f"{where}.{name}") for name in _PASSED_ON if raw.get(name) is not None
    }
    for name in ("reasoning", "reasoning_content"):
        if raw.get(name) is not None:
            message["reasoning_content"] = _string(raw[name], f"{where}.{name}")
    if raw.get("tool_calls"):
        message["tool_calls"] = parse_tool_calls(raw["tool_calls"], f"{where}.tool_calls")
    return message


def _string(raw: Any, where: str) -> str:
    if not isinstance(raw, str):
        raise InvalidRequestError(f"{where} must be a string", param=where)
    return raw


def _content_text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(f"{where} must be a string or a list of text parts", param=where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            is_unserved = isinstance(kind, str) and kind != "text"
            raise (UnsupportedFieldError if is_unserved else InvalidRequestError)(
                f"{where}[{index}] is of type {str(kind)[:40]!r}; this version takes parts of type 'text' with a string",
                param=f"{where}[{index}]",
            )
        texts.append(text)
    return "\n".join(texts)


_REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a template raises about a conversation that it was not made for."""


class ChatTemplate:
    """One model's chat template, compiled once. Raises SettingError where it cannot be compiled.

    tool_source: the template for conversations with tools, where a model has one of its own for those.
    """

    def __init__(
        self, source: str, *, bos_token: str | None, eos_token: str | None, tool_source: str | None = None
    ) -> None:
        self.source = source if tool_source is None else f"{source}\n{tool_source}"
        """The text of all of it."""
        self._knows_developer = "developer" in source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._variables = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        try:
            self._template = environment.from_string(source)
            self._tool_template = environment.from_string(tool_source) if tool_source else self._template
        except jinja2.TemplateError as error:
            raise SettingError(f"the chat template cannot be compiled: {error}", param="model") from error

    def render(self, chat: Chat) -> str:
        """The prompt text. A template without a developer role gets those messages as system messages.

        Raises InvalidRequestError with the template's own words when it refuses the messages.
        """
        messages = chat.messages
        if not self._knows_developer:
            messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
        variables = {
            **chat.template_kwargs,
            **self._variables,
            "messages": messages,
            "tools": list(chat.tools) or None,
            "documents": list(chat.documents) or None,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        template = self._tool_template if chat.tools else self._template
        try:
            text = template.render(variables)
        except _REFUSALS as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return _cut_behind(messages[-1]["content"], text) if chat.continue_final_message else text


def _cut_behind(content: str, text: str) -> str:
    """The prompt up to the end of the last message's content, as the template writes it."""
    bare = content.strip()
    start = text.rfind(bare)
    if not bare or start < 0:
        raise InvalidRequestError(
            "continue_final_message needs a last message with content that the model's chat template writes as it is",
            param="continue_final_message",
        )
    whole = content.lstrip()
    return text[: start + len(whole if text.startswith(whole, start) else bare)]


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks answers for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own protocol)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Replace the block by its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()
