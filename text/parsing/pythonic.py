"""Calls that are written as in a program: a name, and named arguments whose values are literals.

LFM2: ``<|tool_call_start|>[NAME(KEY="VALUE", …), …]<|tool_call_end|>``, or JSON between these tokens.
OLMo 3: ``<function_calls>`` around one call on each line.
Llama 4: ``[NAME(KEY="VALUE", …), …]`` as the whole answer or in ``<|python_start|>``; or JSON as Llama 3 writes it.
Gemma 4: ``<|tool_call>call:NAME{KEY:<|"|>VALUE<|"|>,…}<tool_call|>``.

A value has the type that it is written with, unless the tool's schema does not allow that.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from text.parsing.call_formats import Llama3Parser
from text.parsing.literals import bare_value, copy_literal, copy_string, read_bare, read_quote
from text.parsing.parser import SectionParser
from text.parsing.reader import Steps, decoded
from text.parsing.tool_schema import Allowed, quoted, type_of

_NAME = re.compile(r"[\w.-]+", re.ASCII)
_SECTIONS = {
    "<|tool_call_start|>": "<|tool_call_end|>",
    "<|python_start|>": "<|python_end|>",
    "<function_calls>": "</function_calls>",
}
_CALL = "<|tool_call>"
_CALL_END = "<tool_call|>"


class LiteralParser(SectionParser):
    """Reads named arguments, whose values are literals, and writes them as JSON."""

    quotes: ClassVar[tuple[str, ...]]
    """Texts with which a string begins and ends."""
    separator: ClassVar[str]
    closing: ClassVar[str]
    """Texts between a key and its value, and behind all arguments."""

    def _read_key(self) -> Steps[str]:
        """Read a key and the separator behind it; return an empty text if there is none."""
        reader = self._reader
        if quote := (yield from read_quote(reader, self.quotes)):
            parts: list[str] = []
            yield from copy_string(reader, quote, parts.append)
            key = str(decoded(f'"{"".join(parts)}"'))
        else:
            key = yield from reader.read_all(_NAME)
        yield from reader.skip_space()
        return key if key and (yield from reader.skip(self.separator)) else ""

    def _read_arguments(self, name: str) -> Steps[None]:
        """Read the arguments of a call, which begins with its first key, or its end; otherwise its text stays held.

        If the answer ends within them, the text of an unfinished key ends the arguments; text that does not belong to
        arguments is left held.
        """
        reader = self._reader
        between = "{"
        while True:
            yield from reader.skip_space()
            if (yield from reader.skip(self.closing)):
                self._open(name, between)
                self._arguments("{}" if between == "{" else "}")
                return
            key = yield from self._read_key()
            if not key:
                break
            self._open(name, between)
            self._arguments(f"{between}{quoted(key)}: ")
            between = ", "
            yield from reader.skip_space()
            if not (yield from self._read_value(self._allowed(name, key))):
                return
            reader.hold()
            yield from reader.skip_space()
            yield from reader.skip(",")
        if between != "{":
            self._arguments("}" if (yield from reader.peek()) else reader.release())

    def _open(self, name: str, between: str) -> None:
        """Begin the call before its first argument; drop the held text before another one."""
        if between == "{":
            self._begin(name)
        else:
            self._reader.release()

    def _read_value(self, allowed: Allowed) -> Steps[bool]:
        """Read a value; return False if the answer ends within it."""
        reader = self._reader
        parts: list[str] = []
        if quote := (yield from read_quote(reader, self.quotes)):
            is_text = "string" in allowed.types
            write = self._arguments if is_text else parts.append
            self._arguments('"' if is_text else "")
            is_whole = yield from copy_string(reader, quote, write)
            if is_text:
                self._arguments('"' if is_whole else "")
            else:
                self._arguments(allowed.written(str(decoded(f'"{"".join(parts)}"'))))
            return is_whole
        if (yield from reader.peek()) in ("[", "(", "{"):
            is_whole = yield from copy_literal(reader, self.quotes, parts.append)
            value = "".join(parts)
            self._arguments(quoted(value) if is_whole and allowed.types == {"string"} else value)
            return bool((yield from reader.peek()))
        word = yield from read_bare(reader)
        if not (yield from reader.peek()):
            self._arguments(word)
            return False
        self._arguments(_typed(word.strip(), allowed))
        return True


def _typed(word: str, allowed: Allowed) -> str:
    """Return the JSON text of a bare word: as it is written, or as a string if the schema allows only that."""
    value = bare_value(word or "null")
    if value.startswith('"'):
        return allowed.written(word)
    is_text = type_of(decoded(value)) not in allowed.types and "string" in allowed.types
    return quoted(word) if is_text and word else value


class PythonicParser(LiteralParser, Llama3Parser):
    """Parses calls behind a tag, or as the whole answer if they name offered tools."""

    tags = tuple(tag for pair in _SECTIONS.items() for tag in pair)
    quotes = ("'", '"')
    separator = "="
    closing = ")"

    def _read(self) -> Steps[None]:
        reader = self._reader
        reader.hold()
        yield from self._read_body("", self._tools.__contains__)
        if reader.is_held:
            reader.rewind()
        else:
            yield from self._skip_space()
        yield from self._read_marked(list(_SECTIONS), partial(self._read_body, accepts=bool))

    def _read_body(self, marker: str, accepts: Callable[[str], bool]) -> Steps[None]:
        """Read calls behind a tag, or without one, in either notation."""
        reader = self._reader
        closing = _SECTIONS.get(marker, "")
        yield from reader.skip_space()
        if (yield from reader.peek()) == "{":
            yield from self._read_calls(accepts)
        elif (yield from reader.skip("[")):
            yield from reader.skip_space()
            if closing and (yield from reader.peek()) == "{":
                yield from self._read_list()
            else:
                yield from self._read_section(partial(self._read_call, accepts), "", "]")
        elif closing:
            yield from self._read_section(partial(self._read_call, accepts), "", closing)
            return
        if closing and not reader.is_held:
            yield from reader.skip_space()
            yield from reader.skip(closing)

    def _read_call(self, accepts: Callable[[str], bool]) -> Steps[None]:
        """Read ``NAME(KEY=VALUE, …)``. Without a key it is no call, but an expression."""
        reader = self._reader
        yield from reader.skip(",")
        yield from reader.skip_space()
        name = yield from reader.read_all(_NAME)
        if not name or not accepts(name) or not (yield from reader.skip("(")):
            return
        yield from self._read_arguments(name)


class GemmaParser(LiteralParser):
    """Parses the calls of Gemma 4, anywhere in the answer."""

    tags = (_CALL, _CALL_END, '<|"|>')
    quotes = ('<|"|>', '"')
    separator = ":"
    closing = "}"

    def _read(self) -> Steps[None]:
        yield from self._read_marked([_CALL], self._read_call)

    def _read_call(self, _: str) -> Steps[None]:
        reader = self._reader
        yield from reader.skip_space()
        yield from reader.skip("call:")
        name = yield from reader.read_all(_NAME)
        if not name or not (yield from reader.skip("{")):
            return
        yield from self._read_arguments(name)
        if not reader.is_held:
            yield from reader.skip_space()
            yield from reader.skip(_CALL_END)
