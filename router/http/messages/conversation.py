"""The conversation of /v1/messages: content blocks become the messages of a chat template."""

import json
from collections.abc import Callable
from typing import Any

from contract.errors import InvalidRequestError
from router.http.bodies.body import Body, Json
from router.intake.limits import MAX_MESSAGES
from text.chat import Message, document_text, drop_transport_lines, not_text, readable
from text.tools import check_call_name

ROLES = ("user", "assistant", "system")
_ERROR_PREFIX = "Error: "
"""Prefix of a tool's result with ``is_error``, which templates cannot express otherwise."""


def conversation_of(body: Body) -> list[Message]:
    """Return ``system`` and ``messages`` as messages of a chat; adjacent turns of one role are merged.

    Raises InvalidRequestError that names the wrong message, UnsupportedFieldError for blocks of unsupported types.
    """
    raw = body.get("messages")
    if not isinstance(raw, list) or not raw:
        raise InvalidRequestError("messages must be a list with at least one message", param="messages")
    if len(raw) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages has {len(raw)} entries; the limit is {MAX_MESSAGES}", param="messages"
        )
    system = body.get("system")
    found = [] if system in (None, "", []) else [_text_message("system", _blocks(system, "system"), "system")]
    for role, blocks in _turns(raw):
        found += _TURNS[role](blocks)
    return drop_transport_lines(found)


def is_continued(messages: list[Message]) -> bool:
    """Return True if the conversation ends with a text of the model, which the answer continues."""
    last = messages[-1]
    return last["role"] == "assistant" and bool(last.get("content")) and "tool_calls" not in last


_Block = tuple[Json, str]
"""A block, and its path in the body."""


def _turns(raw: list[Any]) -> list[tuple[str, list[_Block]]]:
    turns: list[tuple[str, list[_Block]]] = []
    for index, message in enumerate(raw):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise InvalidRequestError(f"{where} must be an object with role and content", param=where)
        role = message.get("role")
        if role not in ROLES:
            raise InvalidRequestError(
                f"{where}.role is {str(role)[:40]!r}; choose one of {', '.join(ROLES)}", param=f"{where}.role"
            )
        blocks = _blocks(message.get("content"), f"{where}.content")
        # an empty turn of the model is what a client sends back after an empty answer
        if not blocks and role != "assistant":
            raise InvalidRequestError(f"{where}.content is empty", param=f"{where}.content")
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    return turns


def _blocks(content: Any, where: str) -> list[_Block]:
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be a string or a list of blocks", param=where)
    for index, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            place = f"{where}[{index}]"
            raise InvalidRequestError(f"{place} must be an object with a type", param=place)
    return [(block, f"{where}[{index}]") for index, block in enumerate(content)]


def _user_turn(blocks: list[_Block]) -> list[Message]:
    """Return the results of tools, each as a message, followed by the text."""
    results = [block for block in blocks if block[0]["type"] == "tool_result"]
    texts = [block for block in blocks if block[0]["type"] != "tool_result"]
    # before the text: templates expect the results right behind the calls
    found = [_result(block, where) for block, where in results]
    return [*found, _text_message("user", texts, "tool_result")] if texts else found


def _assistant_turn(blocks: list[_Block]) -> list[Message]:
    """Return the model's turn. Redacted thinking is left out, since it cannot be read.

    A result within the turn (of a tool that its provider ran) ends one message; the rest of the turn is another one.
    """
    found: list[Message] = []
    turn = _Turn()
    for block, where in blocks:
        if block["type"].endswith("_tool_result"):
            found += [*turn.message(), _result(block, where)]
            turn = _Turn()
        else:
            turn.add(block, where)
    return found + turn.message() if found else [turn.whole()]


class _Turn:
    """The texts, thoughts and calls of one message of the model."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Json] = []

    def add(self, block: Json, where: str) -> None:
        """Add a block. A type that is not served becomes a placeholder: the client cannot take it back."""
        match block["type"]:
            case "text":
                self._texts.append(_string(block, "text", where))
            case "thinking":
                self._thoughts.append(_string(block, "thinking", where))
            case "tool_use" | "server_tool_use" | "mcp_tool_use":
                self._calls.append(_call(block, where))
            case "redacted_thinking":
                pass
            case _:
                self._texts.append(readable(block))

    def message(self) -> list[Message]:
        """Return the message, if there is anything in it."""
        return [self.whole()] if self._texts or self._thoughts or self._calls else []

    def whole(self) -> Message:
        """Return the message; its content is None without a text."""
        message: Message = {"role": "assistant", "content": "".join(self._texts) if self._texts else None}
        if any(self._thoughts):
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
        return message


_TURNS: dict[str, Callable[[list[_Block]], list[Message]]] = {
    "user": _user_turn,
    "assistant": _assistant_turn,
    "system": lambda blocks: [_text_message("system", blocks, "")],
}


def _call(block: Json, where: str) -> Json:
    given = block.get("input")
    if given is not None and not isinstance(given, dict):
        raise InvalidRequestError(f"{where}.input must be an object", param=f"{where}.input")
    function = {
        "name": check_call_name(block.get("name"), f"{where}.name"),
        "arguments": json.dumps(given or {}, ensure_ascii=False),
    }
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _result(block: Json, where: str) -> Message:
    """Return a tool's result as text; an image, a file or a reference in it becomes a placeholder."""
    content = block.get("content")
    if isinstance(content, dict):
        content = [content]
    parts = _blocks("" if content is None else content, f"{where}.content")
    text = "\n".join(
        _string(part, "text", place) if part["type"] == "text" else readable(part) for part, place in parts
    )
    prefix = _ERROR_PREFIX if block.get("is_error") is True else ""
    return {"role": "tool", "content": prefix + text, "tool_call_id": _string(block, "tool_use_id", where)}


def _text_message(role: str, blocks: list[_Block], also: str) -> Message:
    """Return a message of text only; several texts remain separate parts. also: another type that is allowed there."""
    kinds = ("text", also) if also == "tool_result" else ("text",)
    texts = [_text(block, where, kinds) for block, where in blocks]
    content: Any = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    return {"role": role, "content": content}


def _text(block: Json, where: str, kinds: tuple[str, ...]) -> str:
    """Return the text of a block that the client writes; only a document or search result that is text has one, too."""
    if block["type"] in ("document", "search_result") and (text := document_text(block)) is not None:
        return text
    if block["type"] != "text":
        raise not_text(where, block["type"], *kinds)
    return _string(block, "text", where)


def _string(block: Json, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value
