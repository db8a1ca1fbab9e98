"""A conversation as the client sent it, checked, with keys in the client's order.

Messages are not adapted to a template here: null, missing and empty contents stay distinct, parts stay parts, and the
arguments of calls stay the client's text. ``text.templates`` finds the form for a template.

"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from contract.errors import InvalidRequestError, UnsupportedFieldError
from text.placeholders import readable
from text.tools import AUTO, Tool, ToolChoice, parse_tool_calls

ROLES = ("system", "developer", "user", "assistant", "tool")
Message = dict[str, Any]
"""Has a role; content (a string, a list of text parts, or None), reasoning_content, tool_calls and others if sent."""
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names under which clients send back an answer's reasoning; the first one with text is used."""
_STRINGS = ("name", "tool_call_id", "reasoning_content", "refusal")
_UNSERVED = ("function_call", "audio")
"""Keys of a message that are not supported."""
_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a content part → key of its text."""
_END = 2**10
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
"""Variables of a template that template_kwargs cannot set."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation to be answered, with the other inputs of the template.

    tools: functions that the model may call; empty hides them. parallel_tool_calls: the model may call more than one.
    template_kwargs: further variables, none of RESERVED. add_generation_prompt: the prompt ends with the header of an
    answer. continue_final_message: the prompt ends within the last message, which the answer continues; not both.
    """

    messages: list[Message]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = AUTO
    parallel_tool_calls: bool = True
    documents: tuple[dict[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def num_certain_characters(self) -> int:
        """Return the number of message characters in every prompt: templates may trim texts, and shorten answers."""
        contents = [message["content"] for message in self.messages if message["role"] != "assistant"]
        return sum(
            _num_inner_characters(text)
            for content in contents
            for text in ([content] if isinstance(content, str) else [part["text"] for part in content])
        )


def _num_inner_characters(text: str) -> int:
    """Return the length without white space at the ends, without copying a long text."""
    head = text[:_END]
    tail = text[-_END:]
    if len(text) < 2 * _END or head.isspace() or tail.isspace():
        return len(text.strip())
    return len(text) - (_END - len(head.lstrip())) - (_END - len(tail.rstrip()))


def parse_messages(raw: Any) -> list[Message]:
    """Check a request's ``messages``; an assistant's may lack content, since an answer may be calls or reasoning only.

    Raises InvalidRequestError with the index of the message at fault.
    """
    if not isinstance(raw, list) or not raw:
        raise InvalidRequestError("messages must be a list with at least one message", param="messages")
    return [_parse_message(message, f"messages[{index}]") for index, message in enumerate(raw)]


def _parse_message(raw: Any, where: str) -> Message:
    if not isinstance(raw, dict):
        raise InvalidRequestError(f"{where} must be an object with role and content", param=where)
    role = raw.get("role")
    if role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role is {role!r}; choose one of {', '.join(ROLES)}", param=f"{where}.role"
        )
    raw = _served(raw, where)
    message: Message = {}
    for key, value in raw.items():
        if key in REASONING_NAMES:
            key = "reasoning_content"
            value = _reasoning(raw, where)
        checked = _checked(key, value, f"{where}.{key}", is_read=role in ("assistant", "tool"))
        if checked is not None or key == "content":
            message[key] = checked
    if message.get("content") is None:
        if role != "assistant":
            raise InvalidRequestError(f"{where}.content is missing", param=f"{where}.content")
        if message.get("refusal"):
            message["content"] = message["refusal"]
    return message


def _served(raw: Message, where: str) -> Message:
    """Check a message for unsupported keys; turn an empty list of parts in answers and results into an empty content.

    A result that is null is empty too: tools that return nothing send it.
    """
    if unserved := next((key for key in _UNSERVED if raw.get(key)), None):
        raise UnsupportedFieldError(
            f"{where}.{unserved} is not supported by this version; put calls into tool_calls",
            param=f"{where}.{unserved}",
        )
    content = raw.get("content", ...)
    is_empty = (raw["role"] in ("assistant", "tool") and content == []) or (
        raw["role"] == "tool" and content is None
    )
    return {**raw, "content": ""} if is_empty else raw


def _checked(key: str, value: Any, where: str, *, is_read: bool) -> Any:
    """Return the checked value of one key of a message; None if the key is to be omitted.

    is_read: parts that are not text get a placeholder: the model's client cannot take back an answer or a result.
    """
    if value is None:
        return None
    if key == "content":
        return _checked_content(value, where, is_read=is_read)
    if key == "tool_calls":
        return parse_tool_calls(value, where) or None if value else None
    return _string(value, where) if key in _STRINGS else value


def _reasoning(raw: Message, where: str) -> str | None:
    named = [name for name in REASONING_NAMES if raw.get(name) is not None]
    if not named:
        return None
    name = next((name for name in named if raw[name]), named[0])
    return _string(raw[name], f"{where}.{name}")


def _string(raw: Any, where: str) -> str:
    if not isinstance(raw, str):
        raise InvalidRequestError(f"{where} must be a string", param=where)
    return raw


def _checked_content(content: Any, where: str, *, is_read: bool) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(f"{where} must be a string or a list of text parts", param=where)
    return [_text_part(part, f"{where}[{index}]", is_read=is_read) for index, part in enumerate(content)]


def _text_part(part: Any, where: str, *, is_read: bool) -> dict[str, Any]:
    """Return a part of type ``text``, converted from other APIs' names for it if necessary."""
    kind = part.get("type") if isinstance(part, dict) else None
    name = _PARTS.get(kind) if isinstance(kind, str) else None
    text = part.get(name) if name else None
    if not isinstance(text, str):
        is_unserved = isinstance(kind, str) and name is None
        if is_unserved and is_read:
            return {"type": "text", "text": readable(part)}
        raise (UnsupportedFieldError if is_unserved else InvalidRequestError)(
            f"{where} is of type {str(kind)[:40]!r}; this version supports parts of type 'text' with a string",
            param=where,
        )
    return dict(part) if kind == "text" else {"type": "text", "text": text}
