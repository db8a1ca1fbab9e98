"""The neutral conversation: what the client sent, checked, in the client's order of keys.

Nothing is brought into a template's form here: null, missing and empty contents stay three things, parts stay parts, and
the arguments of calls stay the client's JSON text, whatever it is. ``text.templates`` finds the form for a template.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from contract.errors import InvalidRequestError, UnsupportedFieldError
from text.tools import AUTO, Tool, ToolChoice, parse_tool_calls

ROLES = ("system", "developer", "user", "assistant", "tool")
Message = dict[str, Any]
"""Has a role; content (a string, a list of text parts, or None), reasoning_content, tool_calls and others if sent."""
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names under which clients send an answer's reasoning back, the first that is a text counts."""
_STRINGS = ("name", "tool_call_id", "reasoning_content", "refusal")
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
"""Variables of a template that a request sets by fields of their own, or not at all."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation to be answered, and what else the template is given.

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
    """Check a request's ``messages``; an assistant's may lack content: an answer may be calls, reasoning, or nothing.

    Raises InvalidRequestError with the index of the message at fault.
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
    message: Message = {}
    for key, value in raw.items():
        if key in REASONING_NAMES:
            key, value = "reasoning_content", _reasoning(raw, where)
        checked = _checked(key, value, f"{where}.{key}")
        if checked is not None or key == "content":
            message[key] = checked
    if message.get("content") is None:
        if role != "assistant":
            raise InvalidRequestError(f"{where}.content is missing", param=f"{where}.content")
        if message.get("refusal"):
            message["content"] = message["refusal"]
    return message


def _checked(key: str, value: Any, where: str) -> Any:
    """Return the value of one key of a message; None for a key that is left out since it says nothing."""
    if value is None:
        return None
    if key == "content":
        return _checked_content(value, where)
    if key == "tool_calls":
        return parse_tool_calls(value, where) or None if value else None
    return _string(value, where) if key in _STRINGS else value


def _reasoning(raw: Message, where: str) -> str | None:
    for name in REASONING_NAMES:
        if raw.get(name) is not None:
            return _string(raw[name], f"{where}.{name}")
    return None


def _string(raw: Any, where: str) -> str:
    if not isinstance(raw, str):
        raise InvalidRequestError(f"{where} must be a string", param=where)
    return raw


def _checked_content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(f"{where} must be a string or a list of text parts", param=where)
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            is_unserved = isinstance(kind, str) and kind != "text"
            raise (UnsupportedFieldError if is_unserved else InvalidRequestError)(
                f"{where}[{index}] is of type {str(kind)[:40]!r}; this version takes parts of type 'text' with a string",
                param=f"{where}[{index}]",
            )
    return content
