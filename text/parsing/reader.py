"""Reads text that arrives in pieces as if it were complete; among it JSON, whose text is not changed.

Every function that may have to wait for text is a generator that yields when it needs more, and is resumed when there is
more or when the text has ended. A format is therefore written in the order in which it is read, and the boundaries of the
pieces do not matter.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import msgspec

from text.stop import num_held_back

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Yields when more text is needed; its result is T."""
Write = Callable[[str], None]

SPACE = " \t\r\n"
MAX_SPACE = 64
"""Limit of white space before markup that belongs to it; a longer one is text, and is not held back."""
_SPACES = re.compile(f"[{SPACE}]+")
_QUOTE = re.compile('"')
_IN_STRING = re.compile(r'[^"\\]+')
_BACKSLASH = re.compile(r"\\")
_ANY = re.compile(".", re.DOTALL)
_BRACKET = re.compile(r"[{}\[\]]")
_BETWEEN = re.compile(r'[^"{}\[\]]+')
_SCALAR = re.compile(r"[-+.\w]+")
_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")
# Keys that may precede the name; any other one means that the object is not a call.
_HARMLESS = ("type", "id", *_ARGUMENTS)


class Reader:
    """Owns the text that has arrived and was not read, and on request the text read since ``hold``."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._held_from: int | None = None
        self.is_ended = False
        """True if no more text will arrive."""

    def add(self, text: str) -> None:
        """Add text that has arrived."""
        start = self._at if self._held_from is None else self._held_from
        self._text = self._text[start:] + text
        self._at -= start
        self._held_from = None if self._held_from is None else 0

    @property
    def is_held(self) -> bool:
        """True if the text read since ``hold`` is kept."""
        return self._held_from is not None

    @property
    def held(self) -> str:
        """The text read since ``hold``."""
        return "" if self._held_from is None else self._text[self._held_from : self._at]

    def hold(self) -> None:
        """Keep the text that is read from here on."""
        self._held_from = self._at

    def release(self) -> str:
        """Return the text read since ``hold``, and stop keeping it."""
        held = self.held
        self._held_from = None
        return held

    def rewind(self) -> None:
        """Return to the place of ``hold``, so that the text since then is read again."""
        self._at -= len(self.held)
        self._held_from = None

    def peek(self) -> Steps[str]:
        """Return the next character without reading it; empty at the end of the text."""
        while self._at == len(self._text) and not self.is_ended:
            yield
        return self._text[self._at : self._at + 1]

    def read(self, pattern: re.Pattern[str]) -> str:
        """Read the match of the pattern at this position in the text that has arrived; empty if there is none."""
        match = pattern.match(self._text, self._at)
        return self._read(len(match[0])) if match else ""

    def read_all(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read consecutive matches of the pattern, up to a character that does not match."""
        found = ""
        while (yield from self.peek()) and (more := self.read(pattern)):
            found += more
        return found

    def skip_space(self) -> Steps[str]:
        """Read white space and return it."""
        return (yield from self.read_all(_SPACES))

    def skip(self, literal: str) -> Steps[bool]:
        """Read exactly this text and return True, or read nothing and return False."""
        while True:
            found = self._text[self._at : self._at + len(literal)]
            if found == literal:
                self._read(len(literal))
                return True
            if self.is_ended or not literal.startswith(found):
                return False
            yield

    def copy_until(self, markers: Sequence[str], write: Write, *, trim: str = SPACE) -> Steps[str | None]:
        """Read up to the first of ``markers``, or the ``trim`` characters before it, and write the text in pieces.

        At most MAX_SPACE characters are trimmed. Returns the marker, which is not read, or None if the text ends first; then
        all of it was written.
        """
        pattern = re.compile("|".join(map(re.escape, markers)))
        while True:
            text = self._text[self._at :]
            if match := pattern.search(text):
                write(self._read(_length_without(trim, text[: match.start()])))
                return match[0]
            if self.is_ended:
                write(self._read(len(text)))
                return None
            certain = text[: len(text) - num_held_back(text, markers)]
            write(self._read(_length_without(trim, certain)))
            yield

    def copy_rest(self, write: Write) -> Steps[None]:
        """Read to the end of the text and write it in pieces."""
        while (yield from self.peek()):
            write(self._read(len(self._text) - self._at))

    def _read(self, length: int) -> str:
        self._at += length
        return self._text[self._at - length : self._at]


def _length_without(trim: str, text: str) -> int:
    end = text[-MAX_SPACE:]
    return len(text) - len(end) + len(end.rstrip(trim))


class CallObject:
    """Parses one such object, with its keys in any order.

    Calls ``begin`` with its name, if that is accepted; then ``arguments`` with pieces of their JSON text.
    """

    def __init__(
        self, reader: Reader, accepts: Callable[[str], bool], begin: Write, arguments: Write
    ) -> None:
        self._reader = reader
        self._accepts = accepts
        self._begin = begin
        self._arguments = arguments
        self._has_begun = False
        self._has_arguments = False
        # Arguments that preceded the name: a call can only be announced by its name.
        self._early: list[str] = []

    def read(self) -> Steps[None]:
        """Read the object at this position, as far as it is a call."""
        reader = self._reader
        if not (yield from reader.skip("{")):
            return
        while (yield from self._read_entry()):
            yield from reader.skip_space()
            if not (yield from reader.skip(",")):
                is_whole = self._has_begun and (yield from reader.skip("}"))
                if is_whole and not self._has_arguments:
                    self._arguments("{}")
                return

    def _read_entry(self) -> Steps[bool]:
        """Read a key and its value; return False if the object is not a call, or invalid."""
        reader = self._reader
        yield from reader.skip_space()
        key = yield from read_string(reader)
        yield from reader.skip_space()
        if key is None or not (yield from reader.skip(":")):
            return False
        yield from reader.skip_space()
        if key == _NAME and not self._has_begun:
            name = yield from read_string(reader)
            if not name or not self._accepts(name):
                return False
            self._begin(name)
            self._has_begun = True
            self._arguments("".join(self._early))
            return True
        if key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            if (yield from reader.peek()) == "{":
                return (yield from copy_value(reader, self._write))
            # Some models write the object as a string. It can only be converted as a whole.
            parts: list[str] = []
            is_whole = yield from copy_value(reader, parts.append)
            written = "".join(parts)
            inner = decoded(written) if written.startswith('"') else None
            if isinstance(inner, str) and isinstance(decoded(inner), dict):
                written = inner
            self._write("{}" if written == "null" else written)
            return is_whole
        if key not in _HARMLESS and not self._has_begun:
            return False
        return (yield from copy_value(reader, lambda _: None))

    def _write(self, text: str) -> None:
        if self._has_begun:
            self._arguments(text)
        else:
            self._early.append(text)


def copy_value(reader: Reader, write: Write) -> Steps[bool]:
    """Read one value and write its text in pieces; return False if there is none, or it does not end.

    Only strings and brackets are checked; the text between them is copied.
    """
    first = yield from reader.peek()
    if first == '"':
        return (yield from _copy_string(reader, write))
    if first and first in "{[":
        depth = 0
        while first := (yield from reader.peek()):
            if first == '"':
                yield from _copy_string(reader, write)
                continue
            depth += (first in "{[") - (first in "}]")
            write(reader.read(_BRACKET) or reader.read(_BETWEEN))
            if depth == 0:
                return True
        return False
    scalar = yield from reader.read_all(_SCALAR)
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


def _copy_string(reader: Reader, write: Write) -> Steps[bool]:
    write(reader.read(_QUOTE))
    while first := (yield from reader.peek()):
        if first == '"':
            write(reader.read(_QUOTE))
            return True
        if first == "\\":
            # The escaped character may be a quote, which does not end the string, and may arrive with the next piece.
            write(reader.read(_BACKSLASH))
            if (yield from reader.peek()):
                write(reader.read(_ANY))
        else:
            write(reader.read(_IN_STRING))
    return False
