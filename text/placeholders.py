"""Text in place of what a text model cannot read in an earlier answer or a tool's result: images, files, references.

Such an item must not refuse the conversation, since its client cannot take it back. An image that a user sends is refused
elsewhere: the answer would not be about it.
"""

import json
from typing import Any

_MAX_KIND = 40
_TEXT_KEYS = ("text", "refusal", "logs", "stdout", "stderr")
_MAX_DEPTH = 16


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
        return _part_text(value)
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


def _part_text(part: dict[str, Any]) -> str:
    if (text := _text_of(part)) is not None:
        return text
    if part["type"] in ("document", "search_result") and (text := document_text(part)) is not None:
        return text
    return placeholder(part["type"])


def _text_of(part: Any) -> str | None:
    found = [part[key] for key in _TEXT_KEYS if isinstance(part.get(key), str)] if _is_part(part) else []
    return "\n".join(found) if found else None


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str)


def _without_data(text: str) -> str:
    return placeholder("data") if text.startswith("data:") and ";base64," in text[:200] else text
