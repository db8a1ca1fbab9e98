"""Calls between tags: a name, then its arguments, tagged one by one or as one JSON object.

Qwen3-Coder, Qwen3.5: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>``.
Seed-OSS: the same, in ``<seed:tool_call>``.
MiniMax: ``<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter>…</invoke></minimax:tool_call>``.
DeepSeek V3.2, V4 (DSML): the same with ``｜DSML｜`` in each tag, and ``string="true"`` beside the key of a text.
GLM 4.5 to 5: ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>``.
Hy3: ``<tool_calls><tool_call>NAME<tool_sep><arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call></tool_calls>``.
DeepSeek V3, R1, V3.1, Kimi K2: a section of calls, each a name and a JSON object between special tokens.

Tagged values are bare text; the tool's schema determines their JSON type.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import ClassVar

from text.parsing.literals import literal_value
from text.parsing.parser import SectionParser, ToolParser
from text.parsing.reader import Steps, Write, copy_value
from text.parsing.tool_schema import Allowed, quoted
from text.tools import Tool

_WORD = re.compile(r"[^<>\s]+")
_IN_QUOTES = re.compile(r'[^<>"\s]+')
_NAME = re.compile(r"[\w.-]+", re.ASCII)
_ID = re.compile(r"[\w.:-]+", re.ASCII)
_FLAG = re.compile(r"\w+")
_NEWLINES = re.compile("\n+")
_TEXT = frozenset({"string"})
_FENCE = "```"
_OF_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


@dataclass(frozen=True, kw_only=True)
class Tags:
    """The tags of a format. Those that a format does not have are empty.

    sections: (opening, closing) tags around all calls. call, name_end: around a call's name. call_end: behind its arguments.
    parameter, key_end: around a parameter's key. value, value_end: around its value. flag: behind a key, followed by true if
    the value is a text and by false if it is JSON. name, key: the characters of names and keys.
    """

    sections: tuple[tuple[str, str], ...] = ()
    call: str
    name_end: str = ""
    call_end: str
    parameter: str = ""
    key_end: str = ""
    value: str = ""
    value_end: str = ""
    flag: str = ""
    name: re.Pattern[str] = _WORD
    key: re.Pattern[str] = _WORD

    def all(self) -> tuple[str, ...]:
        """Return all tags."""
        tags = (
            self.call,
            self.name_end,
            self.call_end,
            self.parameter,
            self.key_end,
            self.value,
            self.value_end,
        )
        return tuple(tag for tag in (*chain.from_iterable(self.sections), *tags) if tag)


class TaggedParser(SectionParser):
    """Parses calls anywhere in the answer. A missing section tag is tolerated if the function is one of the tools."""

    layout: ClassVar[Tags]
    has_newlines: ClassVar[bool] = False
    """One newline after a parameter's tag and one before its end are not part of the value."""
    other_value_ends: ClassVar[tuple[str, ...]] = ()
    """Tags that end a value if its own end is missing."""

    def _read(self) -> Steps[None]:
        sections = dict(self.layout.sections)
        yield from self._read_marked([*sections, self.layout.call], partial(self._read_calls, sections))

    def _read_calls(self, sections: Mapping[str, str], marker: str) -> Steps[None]:
        layout = self.layout
        if marker in sections:
            yield from self._reader.skip_space()
            if not (yield from self._reader.skip(layout.call)):
                return
        accepts = bool if marker in sections or not sections else self._tools.__contains__
        closing = sections.get(marker) or next(iter(sections.values()), "")
        yield from self._read_section(partial(self._read_call, accepts), layout.call, closing)

    def _read_name(self) -> Steps[tuple[str, str]]:
        """Read a call's name, and return it and the call's id; either is empty if there is none."""
        yield from self._reader.skip_space()
        name = yield from self._reader.read_all(self.layout.name)
        is_name = yield from self._reader.skip(self.layout.name_end)
        return (name if is_name else ""), ""

    def _read_call(self, accepts: Callable[[str], bool]) -> Steps[None]:
        """Read a call behind its tag. It counts from its name on, or from its arguments on if no tag ends the name."""
        reader = self._reader
        layout = self.layout
        name, call_id = yield from self._read_name()
        if not name or not accepts(name):
            return
        if layout.name_end and layout.parameter:
            self._begin(name, call_id)
        yield from reader.skip_space()
        is_object = (yield from reader.peek()) == "{"
        is_parameter = bool(layout.parameter) and (yield from reader.skip(layout.parameter))
        is_ended = not is_object and not is_parameter and (yield from reader.skip(layout.call_end))
        if reader.is_held:
            if not (is_object or is_parameter or is_ended):
                return
            self._begin(name, call_id)
        if is_object:
            yield from copy_value(reader, self._arguments)
        elif is_parameter:
            yield from self._read_parameters(name)
        elif is_ended or (yield from reader.peek()):
            self._arguments("{}")
        if not is_ended:
            yield from self._skip_end()

    def _skip_end(self) -> Steps[None]:
        """Skip the tag behind the arguments, and white space before it."""
        self._reader.hold()
        yield from self._reader.skip_space()
        if (yield from self._reader.skip(self.layout.call_end)):
            self._reader.release()
        else:
            self._reader.rewind()

    def _read_parameters(self, name: str) -> Steps[None]:
        """Read the parameters of a call from the first one's key on."""
        reader = self._reader
        layout = self.layout
        between = "{"
        is_parameter = True
        while is_parameter:
            key = yield from reader.read_all(layout.key)
            allowed = self._allowed(name, key)
            if layout.flag and (yield from reader.skip(layout.flag)):
                allowed = _flagged(allowed, is_text=(yield from reader.read_all(_FLAG)) == "true")
            yield from reader.skip(layout.key_end)
            if layout.value:
                yield from reader.skip_space()
                yield from reader.skip(layout.value)
            self._arguments(f"{between}{quoted(key)}: ")
            if not (yield from self._read_value(allowed)):
                return
            between = ", "
            yield from reader.skip_space()
            is_parameter = yield from reader.skip(layout.parameter)
        if (yield from reader.peek()):
            self._arguments("}")

    def _read_value(self, allowed: Allowed) -> Steps[bool]:
        """Read a value; return False if the answer ends within it."""
        if self.has_newlines:
            yield from self._reader.skip("\n")
        if allowed.types == _TEXT:
            self._arguments('"')
            is_whole = yield from self._copy_text(lambda text: self._arguments(quoted(text)[1:-1]))
            self._arguments('"' if is_whole else "")
            return is_whole
        parts: list[str] = []
        is_whole = yield from self._copy_text(parts.append)
        self._arguments(_written("".join(parts), allowed) if is_whole else "")
        return is_whole

    def _copy_text(self, write: Write) -> Steps[bool]:
        reader = self._reader
        value_end = self.layout.value_end
        trim = "\n" if self.has_newlines else ""
        end = yield from reader.copy_until([value_end, *self.other_value_ends], write, trim=trim)
        if self.has_newlines:
            write((yield from reader.read_all(_NEWLINES))[:-1])
        if end == value_end:
            yield from reader.skip(end)
        return end is not None


def _written(text: str, allowed: Allowed) -> str:
    """Return the JSON text of a value. Some templates show lists and objects as Python writes them."""
    written = allowed.written(text)
    if written.startswith('"') and "string" not in allowed.types:
        return literal_value(text) or written
    return written


def _flagged(allowed: Allowed, *, is_text: bool) -> Allowed:
    """Return the values that a schema and the model's own word about the value allow; the schema takes precedence."""
    if "string" not in allowed.types or allowed.types == _TEXT:
        return allowed
    return Allowed(_TEXT if is_text else allowed.types - _TEXT)


def _functions(section: tuple[str, str]) -> Tags:
    """Return the tags of calls that are functions with parameters, in such a section."""
    return Tags(
        sections=(section,),
        call="<function=",
        name_end=">",
        call_end="</function>",
        parameter="<parameter=",
        key_end=">",
        value_end="</parameter>",
    )


class QwenParser(TaggedParser):
    """Parses the calls of Qwen3-Coder and Qwen3.5."""

    tags = ("<tool_call>", "</tool_call>")
    layout = _functions(tags)
    has_newlines = True
    # The model sometimes omits a parameter's end.
    other_value_ends = ("<parameter=", "</function>", "</tool_call>")


class SeedParser(TaggedParser):
    """Parses the calls of Seed-OSS."""

    tags = ("<seed:tool_call>", "</seed:tool_call>")
    layout = _functions(tags)


def _invocations(sections: tuple[tuple[str, str], ...], prefix: str = "", flag: str = "") -> Tags:
    """Return the tags of calls that are invocations of functions. prefix: of the name of each tag."""
    return Tags(
        sections=sections,
        call=f'<{prefix}invoke name="',
        name_end='">',
        call_end=f"</{prefix}invoke>",
        parameter=f'<{prefix}parameter name="',
        flag=flag,
        key_end='">',
        value_end=f"</{prefix}parameter>",
        name=_IN_QUOTES,
        key=_IN_QUOTES,
    )


class MinimaxParser(TaggedParser):
    """Parses the calls of MiniMax."""

    tags = ("<minimax:tool_call>", "</minimax:tool_call>")
    layout = _invocations((tags,))


class GlmParser(TaggedParser):
    """Parses the calls of GLM 4.5 and later."""

    tags = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    layout = Tags(
        call="<tool_call>",
        call_end="</tool_call>",
        parameter="<arg_key>",
        key_end="</arg_key>",
        value="<arg_value>",
        value_end="</arg_value>",
        name=_NAME,
    )


def _hy3(suffix: str) -> Tags:
    """Return the tags of Hy3, all of whose names end with the suffix."""
    return Tags(
        sections=((f"<tool_calls{suffix}>", f"</tool_calls{suffix}>"),),
        call=f"<tool_call{suffix}>",
        name_end=f"<tool_sep{suffix}>",
        call_end=f"</tool_call{suffix}>",
        parameter=f"<arg_key{suffix}>",
        key_end=f"</arg_key{suffix}>",
        value=f"<arg_value{suffix}>",
        value_end=f"</arg_value{suffix}>",
        name=_NAME,
    )


class Hy3PreviewParser(TaggedParser):
    """Parses the calls of Hunyuan's Hy3 preview."""

    layout = _hy3("")
    tags = layout.all()


class Hy3Parser(TaggedParser):
    """Parses the calls of Hunyuan's Hy3."""

    layout = _hy3(":opensource")
    tags = layout.all()


class DsmlParser(TaggedParser):
    """Parses the calls of DeepSeek V3.2 and V4."""

    tags = ("｜DSML｜",)
    layout = _invocations(
        tuple((f"<｜DSML｜{name}>", f"</｜DSML｜{name}>") for name in ("function_calls", "tool_calls")),
        prefix="｜DSML｜",
        flag='" string="',
    )


class DeepseekParser(TaggedParser):
    """Parses the calls of DeepSeek V3.1, and those of V3 and R1: the name behind a type, and the object in a code block."""

    tags = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    )
    layout = Tags(
        sections=(("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),),
        call="<｜tool▁call▁begin｜>",
        name_end="<｜tool▁sep｜>",
        call_end="<｜tool▁call▁end｜>",
        name=_NAME,
    )

    def _read_name(self) -> Steps[tuple[str, str]]:
        reader = self._reader
        name, _ = yield from super()._read_name()
        yield from reader.skip_space()
        if name and (yield from reader.peek()) not in ("", "{", "<"):
            name = yield from reader.read_all(_NAME)
            yield from reader.skip_space()
            if not (yield from reader.skip(f"{_FENCE}json")):
                name = ""
        return name, ""

    def _skip_end(self) -> Steps[None]:
        yield from self._reader.skip_space()
        yield from self._reader.skip(_FENCE)
        yield from super()._skip_end()


class KimiParser(TaggedParser):
    """Parses the calls of Kimi K2 and later. A call is named by ``functions.NAME:NUMBER``, which clients get as its id."""

    tags = (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    )
    layout = Tags(
        sections=(("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
        call="<|tool_call_begin|>",
        name_end="<|tool_call_argument_begin|>",
        call_end="<|tool_call_end|>",
        name=_ID,
    )

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._ids: set[str] = set()

    @staticmethod
    def new_call_id(name: str, index: int) -> str:
        """Return an id as the model writes them; its template shows the id instead of the name."""
        return f"functions.{name}:{index}"

    def _read_name(self) -> Steps[tuple[str, str]]:
        written, _ = yield from super()._read_name()
        found = _OF_ID.fullmatch(written)
        if found is None:
            return "", ""
        # An id that occurs twice would give two calls the same result.
        is_new = written not in self._ids
        self._ids.add(written)
        return found[1], written if is_new else ToolParser.new_call_id(found[1], 0)
