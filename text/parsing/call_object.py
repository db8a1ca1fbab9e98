"""Parses a call that is a JSON object: ``{"name": …, "arguments": {…}}``."""

from collections.abc import Callable

from text.parsing.json_text import copy_value, decoded, read_string
from text.parsing.reader import Reader, Steps, Write

_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")
_HARMLESS = ("type", "id", *_ARGUMENTS)
"""Keys that may precede the name; any other one means that the object is not a call."""


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
        self._early: list[str] = []
        """Arguments that preceded the name."""

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
            return (yield from self._read_name())
        if key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            return (yield from self._read_arguments())
        if key not in _HARMLESS and not self._has_begun:
            return False
        return (yield from copy_value(reader, _nowhere))

    def _read_name(self) -> Steps[bool]:
        name = yield from read_string(self._reader)
        if not name or not self._accepts(name):
            return False
        self._begin(name)
        self._has_begun = True
        self._arguments("".join(self._early))
        return True

    def _read_arguments(self) -> Steps[bool]:
        if (yield from self._reader.peek()) == "{":
            return (yield from copy_value(self._reader, self._write))
        parts: list[str] = []
        is_whole = yield from copy_value(self._reader, parts.append)
        self._write(_as_object("".join(parts)))
        return is_whole

    def _write(self, text: str) -> None:
        if self._has_begun:
            self._arguments(text)
        else:
            self._early.append(text)


def _as_object(written: str) -> str:
    """Convert arguments that are null, or an object in a string, to the object; return others unchanged."""
    if written == "null":
        return "{}"
    inner = decoded(written) if written.startswith('"') else None
    return inner if isinstance(inner, str) and isinstance(decoded(inner), dict) else written


def _nowhere(_: str) -> None:
    pass
