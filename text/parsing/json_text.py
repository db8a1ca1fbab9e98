"""Copies the text of JSON values incrementally, without changing it."""

import re
from typing import Any

import msgspec

from text.parsing.reader import Reader, Steps, Write

_QUOTE = re.compile('"')
_IN_STRING = re.compile(r'[^"\\]+')
_BACKSLASH = re.compile(r"\\")
_ANY = re.compile(".", re.DOTALL)
_BRACKET = re.compile(r"[{}\[\]]")
_BETWEEN = re.compile(r'[^"{}\[\]]+')
_SCALAR = re.compile(r"[-+.\w]+")


def copy_value(reader: Reader, write: Write) -> Steps[bool]:
    """Read one value and write its text in pieces; return False if there is none, or it does not end.

    Only strings and brackets are checked; the text between them is copied.
    """
    first = yield from reader.peek()
    if first == '"':
        return (yield from _copy_string(reader, write))
    if first and first in "{[":
        return (yield from _copy_nested(reader, write))
    scalar = yield from reader.take_all(_SCALAR)
    write(scalar)
    return bool(scalar)


def read_string(reader: Reader) -> Steps[str | None]:
    """Read a string and return its value; None if there is none, it does not end, or it is invalid."""
    parts: list[str] = []
    if (yield from reader.peek()) != '"' or not (yield from _copy_string(reader, parts.append)):
        return None
    value = decoded("".join(parts))
    return value if isinstance(value, str) else None


def decoded(text: str) -> Any:
    """Return the value of a JSON text; None (as for null) if it is invalid."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _copy_nested(reader: Reader, write: Write) -> Steps[bool]:
    depth = 0
    while first := (yield from reader.peek()):
        if first == '"':
            yield from _copy_string(reader, write)
            continue
        depth += (first in "{[") - (first in "}]")
        write(reader.take(_BRACKET) or reader.take(_BETWEEN))
        if depth == 0:
            return True
    return False


def _copy_string(reader: Reader, write: Write) -> Steps[bool]:
    write(reader.take(_QUOTE))
    while first := (yield from reader.peek()):
        if first == '"':
            write(reader.take(_QUOTE))
            return True
        if first == "\\":
            yield from _copy_escape(reader, write)
        else:
            write(reader.take(_IN_STRING))
    return False


def _copy_escape(reader: Reader, write: Write) -> Steps[None]:
    write(reader.take(_BACKSLASH))
    if (yield from reader.peek()):
        write(reader.take(_ANY))
