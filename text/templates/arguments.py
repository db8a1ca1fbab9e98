"""Converts the arguments of calls in a conversation between the client's text and the object that templates need."""

import json
from typing import Any

_MAX_DEPTH = 64


def as_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object in ``text``, or None for anything else.

    None also for an object that Python cannot represent (duplicate keys, NaN, half a surrogate pair, deep nesting).
    """
    if not text.strip():
        return {}
    if text.count("{") + text.count("[") > _MAX_DEPTH and _depth(text) > _MAX_DEPTH:
        return None
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def as_json(text: str) -> str:
    """Return ``text`` if it is a JSON object, else its JSON string; an empty text becomes an empty object."""
    if not text.strip():
        return "{}"
    return text if as_object(text) is not None else json.dumps(text, ensure_ascii=False)


def _depth(text: str) -> int:
    depth = deepest = 0
    is_string = is_escaped = False
    for character in text:
        if is_string:
            if character == '"' and not is_escaped:
                is_string = False
            is_escaped = character == "\\" and not is_escaped
        elif character == '"':
            is_string = True
        elif character in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "}]":
            depth -= 1
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
