"""Repairs the arguments of a call to a JSON object, incrementally.

A model's arguments may be truncated, contain raw newlines, NaN or a trailing comma, or not be an object. Valid parts keep
their values. Invalid parts are kept as far as possible: truncated text is closed, a bare word becomes a string, a missing
value null, and arguments that are not an object become ``{"arguments": …}``.

"""

import json
import re
from typing import Any

import msgspec

from text.parsing.reader import Reader, Steps, Write

# Of objects and lists; a deeper bracket is text, so that the nesting of our own calls stays bounded too.
_MAX_DEPTH = 64
_FILLER = re.compile(r"[\s,]+")
_BEFORE_VALUE = re.compile(r"[\s:]+")
_BARE = re.compile(r'[^\s,:"{}\[\]]+')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_ANY = re.compile(".", re.DOTALL)
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_WRAPPER = "arguments"
_PLAIN = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]+')
_HEX = re.compile("[0-9a-fA-F]")
_SIMPLE_ESCAPES = frozenset('"\\/bfnrt')
_REPLACEMENT = "\ufffd"


def arguments_object(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object; empty for no text and for null."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        found = None
    # Deeper arguments are mended too, as those of a stream are: both ways give the same object.
    is_flat = text.count("{") + text.count("[") <= _MAX_DEPTH
    if isinstance(found, dict) and is_flat:
        return found
    writer = ArgumentsWriter()
    mended: dict[str, Any] = json.loads(writer.push(text) + writer.flush())
    return mended


class ArgumentsWriter:
    """Converts the text of arguments to the text of a JSON object, incrementally. The result is valid for every input."""

    def __init__(self) -> None:
        self._reader = Reader()
        self._out: list[str] = []
        self._depth = 0
        self._steps = self._read()

    def push(self, text: str) -> str:
        """Add text and return the JSON text that is certain now."""
        self._reader.add(text)
        next(self._steps, None)
        return self._drain()

    def flush(self) -> str:
        """Return the rest, at the end of the text; call once."""
        self._reader.is_ended = True
        next(self._steps, None)
        return self._drain()

    def _drain(self) -> str:
        text = "".join(self._out)
        self._out = []
        return text

    def _write(self, text: str) -> None:
        self._out.append(text)

    def _read(self) -> Steps[None]:
        yield from self._reader.skip_space()
        first = yield from self._reader.peek()
        if first == "{":
            yield from self._read_object()
        elif not first:
            self._write("{}")
        elif first in ('"', "["):
            self._write(f'{{"{_WRAPPER}": ')
            yield from self._read_value()
            self._write("}")
        else:
            # The whole text is one value; null stands for no arguments.
            parts: list[str] = []
            yield from self._reader.copy_rest(parts.append)
            text = "".join(parts).rstrip()
            value = text if _NUMBER.fullmatch(text) else _WORDS.get(text) or _quoted(text)
            self._write("{}" if value == "null" else f'{{"{_WRAPPER}": {value}}}')

    def _read_value(self) -> Steps[None]:
        first = yield from self._reader.peek()
        if first == '"':
            yield from _copy_string(self._reader, self._write)
        elif first == "{" and self._depth < _MAX_DEPTH:
            yield from self._read_object()
        elif first == "[" and self._depth < _MAX_DEPTH:
            yield from self._read_list()
        else:
            word = (yield from self._reader.read_all(_BARE)) or self._reader.read(_ANY)
            self._write(word if _NUMBER.fullmatch(word) else _WORDS.get(word) or _quoted(word))

    def _read_object(self) -> Steps[None]:
        reader = self._reader
        yield from reader.skip("{")
        self._depth += 1
        self._write("{")
        between = ""
        while True:
            yield from reader.read_all(_FILLER)
            if not (yield from reader.peek()) or (yield from reader.skip("}")):
                break
            key: str | None
            if (yield from reader.peek()) == '"':
                parts: list[str] = []
                is_whole = yield from _copy_string(reader, parts.append)
                key = str(json.loads("".join(parts))) if is_whole else None
            else:
                key = (yield from reader.read_all(_BARE)) or reader.read(_ANY)
            yield from reader.read_all(_BEFORE_VALUE)
            first = yield from reader.peek()
            # A truncated key has no value that could be kept.
            if key is None or not first:
                continue
            self._write(f"{between}{_quoted(key)}: ")
            between = ", "
            if first in ",}":
                self._write("null")
            else:
                yield from self._read_value()
        self._depth -= 1
        self._write("}")

    def _read_list(self) -> Steps[None]:
        reader = self._reader
        yield from reader.skip("[")
        self._depth += 1
        self._write("[")
        between = ""
        while True:
            yield from reader.read_all(_FILLER)
            if not (yield from reader.peek()) or (yield from reader.skip("]")):
                break
            self._write(between)
            between = ", "
            yield from self._read_value()
        self._depth -= 1
        self._write("]")


def _copy_string(reader: Reader, write: Write) -> Steps[bool]:
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
            write(reader.read(_PLAIN) or _quoted(reader.read(_ANY))[1:-1])
    write('"')
    return is_whole


def _quoted(text: str) -> str:
    """Return the JSON string of a text; half of a surrogate pair becomes U+FFFD."""
    whole = "".join(_REPLACEMENT if "\ud800" <= one <= "\udfff" else one for one in text)
    return json.dumps(whole, ensure_ascii=False)


def _copy_escape(reader: Reader, write: Write) -> Steps[None]:
    reader.read(_ANY)
    kind = yield from reader.peek()
    if kind == "u":
        reader.read(_ANY)
        unit = yield from _read_unit(reader, write)
        if unit is not None:
            yield from _copy_unit(unit, reader, write)
    elif kind in _SIMPLE_ESCAPES:
        write("\\" + reader.read(_ANY))
    elif kind:
        # A backslash without a valid escape: the character after it is copied by the caller.
        write("\\\\")


def _read_unit(reader: Reader, write: Write) -> Steps[int | None]:
    """Return the number in the four digits of an escape; None if the text ends, or if they were written as text."""
    digits = ""
    while len(digits) < 4 and (yield from reader.peek()):
        digit = reader.read(_HEX)
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
    write(_quoted(chr(unit))[1:-1])
