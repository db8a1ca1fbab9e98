"""Chat messages → the prompt text of a model's chat template (jinja2, sandboxed).

The template sees what ``transformers`` gives it: ``messages``, ``add_generation_prompt``, ``bos_token``,
``eos_token``, ``tools``, ``documents``, and the functions ``raise_exception``, ``strftime_now`` and the filter ``tojson``.
"""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contract.errors import InvalidRequestError, SettingError

ROLES = ("system", "developer", "user", "assistant", "tool")
Message = dict[str, Any]
_PASSED_ON = ("name", "tool_calls", "tool_call_id")


def parse_messages(raw: Any) -> list[Message]:
    """Check a request's ``messages`` and bring every content into one string.

    Text parts are joined by newlines. Only an assistant's message with tool calls may lack content. Raises
    InvalidRequestError with the index of the message at fault.
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
    passed_on = {name: raw[name] for name in _PASSED_ON if raw.get(name) is not None}
    return {"role": role, "content": _content_text(content, f"{where}.content"), **passed_on}


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
            raise InvalidRequestError(
                f"{where}[{index}] is of type {kind!r}; this version takes parts of type 'text' with a string",
                param=f"{where}[{index}]",
            )
        texts.append(text)
    return "\n".join(texts)


class ChatTemplate:
    """One model's chat template, compiled once. Raises SettingError where it cannot be compiled."""

    def __init__(self, source: str, *, bos_token: str | None, eos_token: str | None) -> None:
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
        except jinja2.TemplateError as error:
            raise SettingError(f"the chat template cannot be compiled: {error}", param="model") from error

    def render(self, messages: list[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt text. A template without a developer role gets those messages as system messages.

        Raises InvalidRequestError with the template's own words when it refuses the messages.
        """
        if not self._knows_developer:
            messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


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
