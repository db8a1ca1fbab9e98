"""Copies a string, repaired to a valid JSON string, incrementally."""

import json
import re

from text.parsing.reader import Reader, Steps, Write

_PLAIN = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]+')
_ANY = re.compile(".", re.DOTALL)
_HEX = re.compile("[0-9a-fA-F]")
_SIMPLE_ESCAPES = frozenset('"\\/bfnrt')
_REPLACEMENT = "\ufffd"


def copy_string(reader: Reader, write: Write) -> Steps[bool]:
    """Read a string and write it; return False if the text ends within it. The written string is always closed.

    Raw control characters are escaped, a backslash without a valid escape is literal, half of a surrogate pair becomes
    U+FFFD, a truncated escape is dropped.
    """
    yield from reader.skip('"')
    write('"')
    is_whole = False
    while first := (yield from reader.peek()):
        if first == '"':
            is_whole = yield from reader.skip('"')
            break
        if first == "\\":
            yield from _copy_escape(reader, write)
        else:
            write(reader.take(_PLAIN) or quoted(reader.take(_ANY))[1:-1])
    write('"')
    return is_whole


def quoted(text: str) -> str:
    """Return the JSON string of a text; half of a surrogate pair becomes U+FFFD."""
    return json.dumps("".join(map(_scalar, text)), ensure_ascii=False)


def _scalar(character: str) -> str:
    return _REPLACEMENT if "\ud800" <= character <= "\udfff" else character


def _copy_escape(reader: Reader, write: Write) -> Steps[None]:
    reader.take(_ANY)
    kind = yield from reader.peek()
    if kind == "u":
        reader.take(_ANY)
        unit = yield from _read_unit(reader, write)
        if unit is not None:
            yield from _copy_unit(unit, reader, write)
    elif kind in _SIMPLE_ESCAPES:
        write("\\" + reader.take(_ANY))
    elif kind:
        write("\\\\")


def _read_unit(reader: Reader, write: Write) -> Steps[int | None]:
    """Return the number in the four digits of an escape; None if the text ends, or if they were written as text."""
    digits = ""
    while len(digits) < 4 and (yield from reader.peek()):
        digit = reader.take(_HEX)
        if not digit:
            write(f"\\\\u{digits}")
            return None
        digits += digit
    return int(digits, 16) if len(digits) == 4 else None


def _copy_unit(unit: int, reader: Reader, write: Write) -> Steps[None]:
    """Write a UTF-16 unit, together with the following one if they are a pair."""
    while 0xD800 <= unit < 0xDC00 and (yield from reader.skip("\\u")):
        parts: list[str] = []
        low = yield from _read_unit(reader, parts.append)
        if low is None:
            write(_REPLACEMENT + "".join(parts))
            return
        if 0xDC00 <= low < 0xE000:
            write(chr(0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00)))
            return
        write(_REPLACEMENT)
        unit = low
    write(quoted(chr(unit))[1:-1])
