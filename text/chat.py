"""A conversation as the client sent it, checked, with keys in the client's order.

Messages are not adapted to a template here: null, missing and empty contents stay distinct, parts stay parts, and the
arguments of calls stay the client's text. ``text.templates`` finds the form for a template. What a text model cannot read
in an earlier answer or a tool's result (images, files, references) gets a placeholder.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from contract.errors import InvalidRequestError, UnsupportedFieldError
from text.tools import AUTO, Tool, ToolChoice, parse_tool_calls

ROLES = ("system", "developer", "user", "assistant", "tool")
SYSTEM_ROLES = ("system", "developer")
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
# Claude Code sends ``x-anthropic-billing-header: ...; cch=...`` first in its system prompt, different in every request:
# no prefix of the prompt would ever be cached.
_LINES = re.compile(r"(?:[ \t]*x-anthropic-[\w-]{1,64}[ \t]*:[^\n]*(?:\n+|\Z))+", re.IGNORECASE)
_MAX_KIND = 40
_TEXT_KEYS = ("text", "refusal", "logs", "stdout", "stderr")
_MAX_DEPTH = 16


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
        # Templates drop the reasoning in earlier answers, so their characters are not certain.
        contents = [message["content"] for message in self.messages if message["role"] != "assistant"]
        return sum(
            _num_inner_characters(text)
            for content in contents
            for text in ([content] if isinstance(content, str) else [part["text"] for part in content])
        )


def _num_inner_characters(text: str) -> int:
    """Return the length without white space at the ends, without copying a long text."""
    # ``strip`` would copy a text of megabytes, which is rejected by this very number.
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
    raw = _check_message(raw, where)
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
        # A refused answer has only this text; without it the template would show an empty turn.
        if message.get("refusal"):
            message["content"] = message["refusal"]
    return message


def _check_message(raw: Message, where: str) -> Message:
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
    if key == "content" and isinstance(value, str):
        return value
    if key == "content":
        if not isinstance(value, list) or not value:
            raise InvalidRequestError(f"{where} must be a string or a list of text parts", param=where)
        return [_text_part(part, f"{where}[{index}]", is_read=is_read) for index, part in enumerate(value)]
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


def _text_part(part: Any, where: str, *, is_read: bool) -> dict[str, Any]:
    """Return a part of type ``text``, converted from other APIs' names for it if necessary."""
    kind = part.get("type") if isinstance(part, dict) else None
    name = _PARTS.get(kind) if isinstance(kind, str) else None
    text = part.get(name) if name else None
    if not isinstance(text, str):
        # An image that a user sends is refused, since the answer would not be about it. In an earlier answer or a result it
        # is replaced: the client cannot take it back, and every further turn would fail.
        is_unserved = isinstance(kind, str) and name is None
        if is_unserved and is_read:
            return {"type": "text", "text": readable(part)}
        if is_unserved:
            raise not_text(where, kind, "text")
        raise InvalidRequestError(
            f"{where} is of type {str(kind)[:40]!r}; it must be of type 'text' with a string", param=where
        )
    return dict(part) if kind == "text" else {"type": "text", "text": text}


def without_transport_lines(text: str) -> str:
    """Return a system text without the lines of transport at its beginning."""
    found = _LINES.match(text)
    return text[found.end() :] if found else text


def drop_transport_lines(messages: list[Message]) -> list[Message]:
    """Return the messages with such lines removed from system and developer messages; one that is empty then is left out."""
    return [kept for message in messages if (kept := _cleaned(message)) is not None]


def _cleaned(message: Message) -> Message | None:
    content = message.get("content")
    if message["role"] not in SYSTEM_ROLES or not content:
        return message
    if isinstance(content, str):
        text = without_transport_lines(content)
        return message if text == content else {**message, "content": text} if text else None
    # A part that was empty before stays, so that only the lines of transport are removed.
    texts = [without_transport_lines(part["text"]) for part in content]
    parts = [
        {**part, "text": text} for part, text in zip(content, texts, strict=True) if text or not part["text"]
    ]
    if not parts:
        return None
    return {**message, "content": parts[0]["text"] if len(parts) == 1 < len(content) else parts}


def not_text(where: str, kind: object, *served: str) -> UnsupportedFieldError:
    """Return the error for an image, a sound or another part that the model is not given. served: types of text."""
    return UnsupportedFieldError(
        f"{where} is of type {str(kind)[:40]!r}; the model is given text only (type {', '.join(served)})",
        param=where,
    )


def placeholder(kind: object) -> str:
    """Return the text for a part of this type. It is the same in every request, so that prompts keep their prefix."""
    name = "".join(letter for letter in str(kind)[:_MAX_KIND] if letter.isalnum() or letter in "_-.")
    return f"[{name or 'part'}: left out, this model reads text only]"


def readable(value: Any) -> str:
    """Return the text of a result in any form: a text, a list of parts, or an object."""
    if value is None:
        return ""
    if isinstance(value, str):
        return _without_data(value)
    if isinstance(value, list) and all(isinstance(part, str) or _is_part(part) for part in value):
        return "\n".join(readable(part) for part in value)
    if _is_part(value):
        text = _text_of(value)
        if text is None and value["type"] in ("document", "search_result"):
            text = document_text(value)
        return placeholder(value["type"]) if text is None else text
    return json.dumps(outline(value), ensure_ascii=False)


def outline(value: Any, depth: int = 0) -> Any:
    """Return a JSON value with placeholders for inline data (``data:`` URLs) and for what is nested too deeply."""
    if depth > _MAX_DEPTH:
        return placeholder("nested")
    if isinstance(value, str):
        return _without_data(value)
    if isinstance(value, list):
        return [outline(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {key: outline(item, depth + 1) for key, item in value.items()}
    return value


def document_text(part: dict[str, Any]) -> str | None:
    """Return the text of a ``document`` or ``search_result`` in Anthropic's format; None if it has none."""
    source = part.get("source")
    content: Any = part.get("content")
    if isinstance(source, dict):
        content = source.get("data") if source.get("type") == "text" else source.get("content")
        source = None
    if isinstance(content, list) and all(_text_of(item) is not None for item in content):
        content = "\n".join(str(_text_of(item)) for item in content)
    if not isinstance(content, str):
        return None
    head = [line for line in (part.get("title"), source, part.get("context")) if isinstance(line, str)]
    return "\n".join([*head, content])


def _text_of(part: Any) -> str | None:
    found = [part[key] for key in _TEXT_KEYS if isinstance(part.get(key), str)] if _is_part(part) else []
    return "\n".join(found) if found else None


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str)


def _without_data(text: str) -> str:
    return placeholder("data") if text.startswith("data:") and ";base64," in text[:200] else text
