"""Merges adjacent and later system and developer messages, for templates that do not support them."""

from itertools import pairwise
from typing import Any

from text.chat import Message

SEPARATOR = "\n\n"
"""Separates the texts of merged messages."""
SYSTEM_ROLES = ("system", "developer")


def content_text(content: Any) -> str:
    """Return the text of a content; parts are joined by newlines."""
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content)
    return content or ""


def merge_systems(
    messages: list[Message], apart: frozenset[tuple[str, ...]], later: frozenset[str]
) -> list[Message]:
    """Return the messages with their leading system messages merged, unless ``apart`` has their roles (each pair).

    Later ones whose role is not in ``later`` are appended to the leading one, in order.
    """
    num_leading = next(
        (index for index, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES),
        len(messages),
    )
    leading = messages[:num_leading]
    rest = messages[num_leading:]
    moved = [message for message in rest if message["role"] in SYSTEM_ROLES and message["role"] not in later]
    kept = [message for message in rest if message["role"] not in SYSTEM_ROLES or message["role"] in later]
    if _may_stay_apart(leading, apart):
        if moved:
            leading = [*leading[:-1], _merged([*leading[-1:], *moved])]
    elif leading or moved:
        leading = [_merged([*leading, *moved])]
    return leading + kept


def system_into_user(messages: list[Message]) -> list[Message]:
    """Return the messages with the leading system message at the beginning of the first user message."""
    if not messages or messages[0]["role"] not in SYSTEM_ROLES:
        return messages
    first, *rest = messages
    for index, message in enumerate(rest):
        if message["role"] == "user":
            rest[index] = {**message, "content": _joined([first, message])}
            return rest
    return messages


def add_to_system(messages: list[Message], text: str) -> list[Message]:
    """Return the messages with ``text`` after the leading system message, which is added if there is none."""
    addition: Message = {"role": "system", "content": text}
    if messages and messages[0]["role"] in SYSTEM_ROLES:
        return [_merged([messages[0], addition]), *messages[1:]]
    return [addition, *messages]


def _may_stay_apart(leading: list[Message], apart: frozenset[tuple[str, ...]]) -> bool:
    roles = [message["role"] for message in leading]
    return bool(roles) and all(pair in apart for pair in pairwise(roles))


def _merged(messages: list[Message]) -> Message:
    return messages[0] if len(messages) == 1 else {**messages[0], "content": _joined(messages)}


def _joined(messages: list[Message]) -> str:
    return SEPARATOR.join(text for message in messages if (text := content_text(message["content"])))
