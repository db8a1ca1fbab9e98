"""Merges leading system and developer messages, and marks later ones, for templates that do not support them.

A later message stays at its place, so that the prompt of a conversation is the beginning of the prompt of its next turn: a
text that moved to the top would let every turn compute everything anew.
"""

from itertools import pairwise
from typing import Any

from text.chat import Message

SEPARATOR = "\n\n"
"""Separates the texts of merged messages."""
SYSTEM_ROLES = ("system", "developer")
_BEGIN = "<system-reminder>\n"
_END = "\n</system-reminder>"


def content_text(content: Any) -> str:
    """Return the text of a content; parts are joined by newlines."""
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content)
    return content or ""


def merge_systems(
    messages: list[Message], apart: frozenset[tuple[str, ...]], later: frozenset[str]
) -> list[Message]:
    """Return the messages with their leading system messages merged, unless ``apart`` has their roles (each pair).

    Later ones whose role is not in ``later`` become marked texts of a turn of the user, at their places.
    """
    num_leading = next(
        (index for index, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES),
        len(messages),
    )
    leading = messages[:num_leading]
    if leading and not _may_stay_apart(leading, apart):
        leading = [_merged(leading)]
    return leading + _marked(messages[num_leading:], later)


def _marked(messages: list[Message], later: frozenset[str]) -> list[Message]:
    """Return the messages with each system message whose role is not in ``later`` within another one, marked.

    It follows the text of the question or of the tool's result before it: a message of its own would be a new question,
    before which many templates drop the model's reasoning. Behind an answer it precedes the next question.
    """
    found: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        role = message["role"]
        if role in SYSTEM_ROLES and role not in later:
            text = f"{_BEGIN}{content_text(message['content'])}{_END}"
            if found and found[-1]["role"] in ("user", "tool") and not waiting:
                found[-1] = _with_text(found[-1], after=text)
            else:
                waiting.append(text)
            continue
        if waiting and role == "user":
            message = _with_text(message, before=SEPARATOR.join(waiting))
            waiting = []
        elif waiting:
            found.append({"role": "user", "content": SEPARATOR.join(waiting)})
            waiting = []
        found.append(message)
    if waiting:
        found.append({"role": "user", "content": SEPARATOR.join(waiting)})
    return found


def _with_text(message: Message, *, before: str = "", after: str = "") -> Message:
    content = message.get("content")
    if isinstance(content, list):
        parts = [{"type": "text", "text": text} for text in (before, after)]
        return {**message, "content": [part for part in [parts[0], *content, parts[1]] if part["text"]]}
    return {**message, "content": SEPARATOR.join(text for text in (before, content, after) if text)}


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
