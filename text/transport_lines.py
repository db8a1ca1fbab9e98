"""Lines of transport that clients put into a system prompt, which are no part of the conversation.

Claude Code's ``x-anthropic-billing-header: ...; cch=...`` stands first and differs in every request, so that no prefix of
the prompt would ever be cached. Only lines at the beginning of a system text are read.
"""

import re

from text.chat import Message
from text.templates.systems import SYSTEM_ROLES

_LINES = re.compile(r"(?:[ \t]*x-anthropic-[\w-]{1,64}[ \t]*:[^\n]*(?:\n+|\Z))+", re.IGNORECASE)


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
    texts = [without_transport_lines(part["text"]) for part in content]
    parts = [
        {**part, "text": text} for part, text in zip(content, texts, strict=True) if text or not part["text"]
    ]
    if not parts:
        return None
    return {**message, "content": parts[0]["text"] if len(parts) == 1 < len(content) else parts}
