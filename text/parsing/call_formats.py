"""The formats of calls, by the models that write them.

Hermes 2 Pro, Qwen 2.5 and Qwen 3: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` for each call.
Llama 3.1 to 3.3: ``{"name": …, "parameters": {…}}`` as the whole answer; several are separated by semicolons.
Mistral: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, and since 2025 ``[TOOL_CALLS]name[ARGS]{…}`` for each.
Qwen3-Coder: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>``, with bare text as
values; the tool's schema determines their JSON type.
"""

import re
import secrets
import string
from collections.abc import Callable, Sequence

from text.parsing.parser import ToolParser
from text.parsing.reader import Steps, Write, copy_value
from text.parsing.tool_schema import Allowed, ToolSchema, quoted
from text.tools import Tool

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_CALLS = "[TOOL_CALLS]"
_CALL_ID = "[CALL_ID]"
_ARGS = "[ARGS]"
_NAME = re.compile(r"[\w.-]+", re.ASCII)
_ID_LENGTH = 9
_ID_CHARACTERS = string.ascii_letters + string.digits
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
# Models sometimes omit the first one.
_VALUE_ENDS = (_PARAMETER_END, _PARAMETER, _FUNCTION_END, _CLOSE)
_WORD = re.compile(r"[^<>\s]+")
_NEWLINES = re.compile("\n+")


class HermesParser(ToolParser):
    """Parses calls between tags, anywhere in the answer; the last closing tag may be missing."""

    tags = (_OPEN, _CLOSE)

    def _read(self) -> Steps[None]:
        yield from self._read_marked([_OPEN], self._read_call)

    def _read_call(self, _: str) -> Steps[None]:
        yield from self._reader.skip_space()
        yield from self._read_object()
        if not self._reader.is_held:
            yield from self._reader.skip_space()
            yield from self._reader.skip(_CLOSE)


class Llama3Parser(ToolParser):
    """Parses calls after the tag, or at the answer's beginning if they name an offered tool.

    An answer that is JSON but not a call stays content.
    """

    tags = (_PYTHON_TAG,)

    def _read(self) -> Steps[None]:
        reader = self._reader
        reader.hold()
        yield from reader.skip_space()
        if (yield from reader.peek()) == "{":
            # Without the tag an answer may be JSON by itself: only the name of an offered tool makes it a call.
            yield from self._read_calls(self._tools.__contains__)
        if reader.is_held:
            self._give_back()
        yield from self._read_marked([_PYTHON_TAG], lambda _: self._read_calls(bool))

    def _read_calls(self, accepts: Callable[[str], bool]) -> Steps[None]:
        reader = self._reader
        yield from reader.skip_space()
        yield from self._read_object(accepts)
        while not reader.is_held:
            reader.hold()
            yield from reader.skip_space()
            yield from reader.skip(";")
            yield from reader.skip_space()
            following = yield from reader.peek()
            if following == "{":
                yield from self._read_object(accepts)
            elif not following or not reader.held.strip():
                space = reader.release()
                self._space = self._space or space
                return


class MistralParser(ToolParser):
    """Parses calls that follow a tag, anywhere in the answer."""

    tags = (_CALLS, _CALL_ID, _ARGS)

    def _read(self) -> Steps[None]:
        yield from self._read_marked([_CALLS], self._read_calls)

    @staticmethod
    def new_call_id() -> str:
        """Return 9 letters and digits: these models' templates reject other ids."""
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))

    def _read_calls(self, _: str) -> Steps[None]:
        reader = self._reader
        yield from reader.skip_space()
        if (yield from reader.skip("[")):
            yield from self._read_list()
            return
        if (yield from reader.peek()) == "{":
            yield from self._read_object()
            return
        # Newer models write the function's name first, and an id between it and the arguments.
        name = yield from reader.read_all(_NAME)
        if name and (yield from reader.skip(_CALL_ID)):
            yield from reader.read_all(_NAME)
        yield from reader.skip(_ARGS)
        yield from reader.skip_space()
        if name and (yield from reader.peek()) == "{":
            self._begin(name)
            yield from copy_value(reader, self._arguments)


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
        name = yield from reader.read_all(_WORD)
        is_function = name and (marker == _OPEN or name in self._tools)
        if not is_function or not (yield from reader.skip(">")):
            return
        self._begin(name)
        schema = self._schema_of(name)
        between = "{"
        yield from reader.skip_space()
        while (yield from reader.skip(_PARAMETER)):
            key = yield from reader.read_all(_WORD)
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

    def _schema_of(self, name: str) -> ToolSchema:
        """Return a tool's schema, which is read once for all its calls."""
        tool = self._tools.get(name)
        if tool is None:
            return ToolSchema(None)
        if name not in self._schemas:
            self._schemas[name] = ToolSchema(tool["function"].get("parameters"))
        return self._schemas[name]

    def _read_value(self, allowed: Allowed) -> Steps[bool]:
        """Read a value; return False if the answer ends within it."""
        yield from self._reader.skip("\n")
        if allowed.types == {"string"}:
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
        write((yield from reader.read_all(_NEWLINES))[:-1])
        if end == _PARAMETER_END:
            yield from reader.skip(end)
        return end is not None
