"""Decoding of JSON from clients, into a ``Body``.

Values are counted before, since many small ones cost far more than their bytes.
"""

import json
from typing import Any

import msgspec

from contract.errors import InvalidRequestError, PayloadTooLargeError
from router.http.bodies.body import Body, Json
from router.intake.limits import Throttle
from serving.settings_file import nearest

MAX_DEPTH = 100
"""Deeper values cannot be rendered (in a message, by a chat template) within Python's recursion limit."""
MAX_LISTS = 2**16
"""Lists and objects in one body."""
LARGE_BYTES = 2**19
"""Larger bodies are decoded one at a time, and pause so that most of the event loop's time is left to others."""
_SPAN_BYTES = 2**19
_CHUNK_BYTES = 2**16


async def decode_body(raw: bytes, max_values: int, schema: Json, *, is_strict: bool) -> Body:
    """Return the JSON object in ``raw``, whose fields ``schema`` describes.

    max_values: most values in it. is_strict: reject fields that are not described. Raises PayloadTooLargeError,
    InvalidRequestError.
    """
    data = await decode(raw, max_values)
    if not isinstance(data, dict):
        raise InvalidRequestError("the body must be a JSON object")
    body = Body(data, schema)
    if is_strict:
        _reject_unknown(data, schema)
        body.is_strict = True
    return body


async def decode(raw: bytes, max_values: int) -> Any:
    """Return the value of a JSON text.

    max_values: most values in it. Raises PayloadTooLargeError, InvalidRequestError. Other coroutines run while values are
    counted; decoding then takes some ten milliseconds at most.
    """
    is_tiny = len(raw) <= min(MAX_LISTS, max_values)  # a value takes a byte at least
    if not is_tiny and not await _has_few(raw, max_values):
        await _count(raw, max_values)
    rest = Throttle()
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {_reason(raw, error)}") from error
    # a bound on the depth that costs little; few bodies have to be walked through
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _is_too_deep(data):
        raise InvalidRequestError(f"the body is nested deeper than {MAX_DEPTH} objects and lists")
    # decoding itself cannot pause, so the time that it took is left to others afterwards
    if len(raw) > LARGE_BYTES:
        await rest.after_work()
    return data


async def _has_few(raw: bytes, max_values: int) -> bool:
    """Return True if the text is within the limits even when the brackets and commas inside its strings are counted."""
    num_lists = num_commas = 0
    rest = Throttle()
    for start in range(0, len(raw), _SPAN_BYTES):
        lists, commas = _at_most(raw, start, start + _SPAN_BYTES)
        num_lists += lists
        num_commas += commas
        if num_lists > MAX_LISTS or num_lists + num_commas > max_values:
            return False
        if start + _SPAN_BYTES < len(raw):
            await rest.after_work()
    return True


def _at_most(text: bytes, start: int = 0, end: int | None = None) -> tuple[int, int]:
    """Count brackets and commas: upper bounds on the lists and objects in a text, and on its other values."""
    return text.count(b"[", start, end) + text.count(b"{", start, end), text.count(b",", start, end)


async def _count(raw: bytes, max_values: int) -> None:
    """Count exactly, outside of strings, a piece at a time. Raises PayloadTooLargeError beyond the limits."""
    num_lists = num_commas = 0
    is_inside = False
    left = b""
    rest = Throttle()
    for start in range(0, len(raw), _CHUNK_BYTES):
        piece = left + raw[start : start + _CHUNK_BYTES]
        # A backslash at the end escapes the next piece's first byte.
        num_bare = len(piece.rstrip(b"\\"))
        left = piece[num_bare:]
        piece = piece[:num_bare].replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[int(is_inside) :: 2])
        # an odd number of quotes: the next piece begins on the other side of one
        is_inside ^= len(parts) % 2 == 0
        lists, commas = _at_most(outside)
        num_lists += lists
        num_commas += commas
        if num_lists > MAX_LISTS or num_lists + num_commas > max_values:
            raise PayloadTooLargeError(
                f"the body has more than {MAX_LISTS} lists and objects, or more than {max_values} values; "
                "send fewer in one request"
            )
        await rest.after_work()


def _is_too_deep(data: Any) -> bool:
    level = [data]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (
                outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ()
            )
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _reason(raw: bytes, error: Exception) -> str:
    """Return the parser's message; for half of a surrogate pair our own, since msgspec calls it truncated data."""
    if b"\\u" not in raw:
        return str(error)
    try:
        json.dumps(json.loads(raw), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "a string holds half of a surrogate pair (a lone \\ud800..\\udfff)"
    except (ValueError, RecursionError):
        pass
    return str(error)


def _reject_unknown(fields: dict[str, Any], schema: Json, where: str = "") -> None:
    """Raise InvalidRequestError that names the fields which ``schema`` does not describe, also in inner objects."""
    known = schema.get("properties")
    if known is None:
        return
    if unknown := [name for name in fields if name not in known]:
        named = ", ".join(f"'{where}{name[:60]}'" for name in unknown[:5])
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise InvalidRequestError(
            f"Unknown parameter: {named}{more}{nearest(unknown[0], known)}",
            param=f"{where}{unknown[0][:60]}",
            code="unknown_parameter",
        )
    for name, value in fields.items():
        if isinstance(value, dict):
            _reject_unknown(value, known[name], f"{where}{name}.")
