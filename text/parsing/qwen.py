"""Qwen3-Coder: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>``.

The values are bare text; the tool's schema determines their JSON type.
"""

import re
from collections.abc import Sequence

from text.parsing.allowed_values import Allowed, quoted
from text.parsing.parser import ToolParser
from text.parsing.reader import Steps, Write
from text.parsing.tool_schema import ToolSchema
from text.tools import Tool

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
_VALUE_ENDS = (_PARAMETER_END, _PARAMETER, _FUNCTION_END, _CLOSE)
"""Models sometimes omit the first one."""
_NAME = re.compile(r"[^<>\s]+")
_NEWLINES = re.compile("\n+")


class QwenParser(ToolParser):
    """Parses calls anywhere in the answer. The outer tag may be missing if the function is one of the tools.

    One newline after a parameter's tag and one before its end are not part of the value.
    """

    tags = (_OPEN, _CLOSE)

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._schemas: dict[str, ToolSchema] = {}

    def _read(self) -> Steps[None]:
        yield from self._read_marked([_OPEN, _FUNCTION], self._read_call)

    def _read_call(self, marker: str) -> Steps[None]:
        reader = self._reader
        yield from reader.skip_space()
        if marker == _OPEN and not (yield from reader.skip(_FUNCTION)):
            return
        name = yield from reader.take_all(_NAME)
        is_function = name and (marker == _OPEN or name in self._tools)
        if is_function and (yield from reader.skip(">")):
            self._begin(name)
            yield from self._read_parameters(self._schema_of(name))

    def _schema_of(self, name: str) -> ToolSchema:
        """Return a tool's schema, which is read once for all its calls."""
        tool = self._tools.get(name)
        if tool is None:
            return ToolSchema(None)
        if name not in self._schemas:
            self._schemas[name] = ToolSchema(tool["function"].get("parameters"))
        return self._schemas[name]

    def _read_parameters(self, schema: ToolSchema) -> Steps[None]:
        reader = self._reader
        between = "{"
        yield from reader.skip_space()
        while (yield from reader.skip(_PARAMETER)):
            key = yield from reader.take_all(_NAME)
            yield from reader.skip(">")
            self._arguments(f"{between}{quoted(key)}: ")
            if not (yield from self._read_value(schema.parameter(key))):
                return
            between = ", "
            yield from reader.skip_space()
        if (yield from reader.peek()):
            self._arguments("{}" if between == "{" else "}")
            yield from reader.skip(_FUNCTION_END)
            yield from reader.skip_space()
            yield from reader.skip(_CLOSE)

    def _read_value(self, allowed: Allowed) -> Steps[bool]:
        """Read a value; return False if the answer ends within it."""
        yield from self._reader.skip("\n")
        if allowed.is_text:
            self._arguments('"')
            is_whole = yield from self._copy_text(lambda text: self._arguments(quoted(text)[1:-1]))
            self._arguments('"' if is_whole else "")
            return is_whole
        parts: list[str] = []
        is_whole = yield from self._copy_text(parts.append)
        self._arguments(allowed.written("".join(parts)) if is_whole else "")
        return is_whole

    def _copy_text(self, write: Write) -> Steps[bool]:
        reader = self._reader
        end = yield from reader.copy_until(_VALUE_ENDS, write, trim="\n")
        write((yield from reader.take_all(_NEWLINES))[:-1])
        if end == _PARAMETER_END:
            yield from reader.skip(end)
        return end is not None
