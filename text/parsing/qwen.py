"""Qwen3-Coder: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>``.

The values are bare text; the tool's schema says which JSON they are.
"""

import json
import re
from typing import Any

from text.parsing.json_text import decoded
from text.parsing.parser import ToolParser
from text.parsing.reader import Steps, Write

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_ENDS = (_PARAMETER_END, _PARAMETER, _FUNCTION_END, _CLOSE)
"""Models leave the first one out at times."""
_NAME = re.compile(r"[^<>\s]+")
_NEWLINES = re.compile("\n+")
_SPELLED = {"True": "true", "False": "false", "None": "null"}


class QwenParser(ToolParser):
    """Calls may stand anywhere in the answer. The outer tag may be missing where the function is one of the tools.

    One newline after a parameter's tag and one before its end are not part of the value.
    """

    tags = (_OPEN, _CLOSE)

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
            yield from self._read_parameters(_properties(self._tools.get(name)))

    def _read_parameters(self, schemas: dict[str, Any]) -> Steps[None]:
        reader = self._reader
        between = "{"
        yield from reader.skip_space()
        while (yield from reader.skip(_PARAMETER)):
            key = yield from reader.take_all(_NAME)
            yield from reader.skip(">")
            self._arguments(f"{between}{_quoted(key)}: ")
            if not (yield from self._read_value(schemas.get(key))):
                return
            between = ", "
            yield from reader.skip_space()
        if (yield from reader.peek()):
            self._arguments("{}" if between == "{" else "}")
            yield from reader.skip(_FUNCTION_END)
            yield from reader.skip_space()
            yield from reader.skip(_CLOSE)

    def _read_value(self, schema: Any) -> Steps[bool]:
        """False where the answer ends within the value."""
        yield from self._reader.skip("\n")
        types = _types(schema)
        if types == {"string"}:
            self._arguments('"')
            is_whole = yield from self._copy_text(lambda text: self._arguments(_quoted(text)[1:-1]))
            self._arguments('"' if is_whole else "")
            return is_whole
        parts: list[str] = []
        is_whole = yield from self._copy_text(parts.append)
        self._arguments(_as_json("".join(parts), types) if is_whole else "")
        return is_whole

    def _copy_text(self, write: Write) -> Steps[bool]:
        reader = self._reader
        end = yield from reader.copy_until(_VALUE_ENDS, write, trim="\n")
        write((yield from reader.take_all(_NEWLINES))[:-1])
        if end == _PARAMETER_END:
            yield from reader.skip(end)
        return end is not None


def _properties(tool: Any) -> dict[str, Any]:
    found = tool["function"]["parameters"].get("properties") if tool else None
    return found if isinstance(found, dict) else {}


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema allows; empty where it does not say."""
    if not isinstance(schema, dict):
        return set()
    found = schema.get("type")
    listed = found if isinstance(found, list) else [found]
    types = {one for one in listed if isinstance(one, str)}
    for name in ("anyOf", "oneOf"):
        inner = schema.get(name)
        types.update(*map(_types, inner if isinstance(inner, list) else ()))
    return types


def _as_json(text: str, types: set[str]) -> str:
    """The JSON text of a value. Where the schema does not say, only objects and lists are not strings."""
    bare = text.strip()
    bare = _SPELLED.get(bare, bare)
    value = decoded(bare)
    if value is None and bare != "null":
        return _quoted(text)
    if not types:
        return bare if isinstance(value, dict | list) else _quoted(text)
    is_string = "string" in types and (value is not None or "null" not in types)
    return _quoted(text) if is_string else bare


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
