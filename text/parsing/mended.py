"""Repairs the arguments of a call to a JSON object, incrementally.

A model's arguments may be truncated, contain raw newlines, NaN or a trailing comma, or not be an object. Valid parts keep
their values. Invalid parts are kept as far as possible: truncated text is closed, a bare word becomes a string, a missing
value null, and arguments that are not an object become ``{"arguments": …}``.

"""

import json
import re
from typing import Any

import msgspec

from text.parsing.mended_string import copy_string, quoted
from text.parsing.reader import Reader, Steps

_MAX_DEPTH = 64
"""Nesting limit of objects and lists; a deeper bracket is text."""
_FILLER = re.compile(r"[\s,]+")
_BEFORE_VALUE = re.compile(r"[\s:]+")
_BARE = re.compile(r'[^\s,:"{}\[\]]+')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_ANY = re.compile(".", re.DOTALL)
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_WRAPPER = "arguments"


def arguments_object(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object; empty for no text and for null."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        found = None
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
        return self._taken()

    def flush(self) -> str:
        """Return the rest, at the end of the text; call once."""
        self._reader.is_ended = True
        next(self._steps, None)
        return self._taken()

    def _taken(self) -> str:
        taken = "".join(self._out)
        self._out = []
        return taken

    def _write(self, text: str) -> None:
        self._out.append(text)

    def _read(self) -> Steps[None]:
        yield from self._reader.skip_space()
        first = yield from self._reader.peek()
        if first == "{":
            yield from self._read_object()
        elif not first:
            self._write("{}")
        else:
            yield from self._read_wrapped()

    def _read_wrapped(self) -> Steps[None]:
        """Read the whole text as one value; null stands for no arguments."""
        start = yield from self._reader.peek()
        if start in ('"', "["):
            self._write(f'{{"{_WRAPPER}": ')
            yield from self._read_value()
            self._write("}")
            return
        parts: list[str] = []
        yield from self._reader.copy_rest(parts.append)
        text = "".join(parts).rstrip()
        value = text if _NUMBER.fullmatch(text) else _WORDS.get(text) or quoted(text)
        self._write("{}" if value == "null" else f'{{"{_WRAPPER}": {value}}}')

    def _read_value(self) -> Steps[None]:
        first = yield from self._reader.peek()
        if first == '"':
            yield from copy_string(self._reader, self._write)
        elif first == "{" and self._depth < _MAX_DEPTH:
            yield from self._read_object()
        elif first == "[" and self._depth < _MAX_DEPTH:
            yield from self._read_list()
        else:
            word = (yield from self._reader.take_all(_BARE)) or self._reader.take(_ANY)
            self._write(word if _NUMBER.fullmatch(word) else _WORDS.get(word) or quoted(word))

    def _read_object(self) -> Steps[None]:
        reader = self._reader
        yield from reader.skip("{")
        self._depth += 1
        self._write("{")
        between = ""
        while True:
            yield from reader.take_all(_FILLER)
            if not (yield from reader.peek()) or (yield from reader.skip("}")):
                break
            key = yield from self._read_key()
            yield from reader.take_all(_BEFORE_VALUE)
            first = yield from reader.peek()
            if key is None or not first:
                continue
            self._write(f"{between}{quoted(key)}: ")
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
            yield from reader.take_all(_FILLER)
            if not (yield from reader.peek()) or (yield from reader.skip("]")):
                break
            self._write(between)
            between = ", "
            yield from self._read_value()
        self._depth -= 1
        self._write("]")

    def _read_key(self) -> Steps[str | None]:
        """Read a property's name, also without quotes; None if it is truncated."""
        reader = self._reader
        if (yield from reader.peek()) != '"':
            return (yield from reader.take_all(_BARE)) or reader.take(_ANY)
        parts: list[str] = []
        is_whole = yield from copy_string(reader, parts.append)
        return str(json.loads("".join(parts))) if is_whole else None
