"""Calls that are JSON objects with a name and arguments, by the models that write them.

Hermes 2 Pro, Qwen 2.5 and Qwen 3: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` for each call.
Ernie 4.5: the same, with the answer itself in ``<response>``.
Granite 3: ``<|tool_call|>[{"name": …, "arguments": {…}}, …]``, with the answer itself in ``<response>`` if it has reasoning.
Hunyuan A13B: ``<tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls>``, with the answer itself in ``<answer>``.
Nemotron Nano 2: the same list in ``<TOOLCALL>``.
Phi-4-mini: the same list in ``<|tool_call|>``, or behind ``functools``.
Llama 3.1 to 3.3: ``{"name": …, "parameters": {…}}`` as the whole answer; several are separated by semicolons.
Mistral: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, and since 2025 ``[TOOL_CALLS]name[ARGS]{…}`` for each.
"""

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from text.parsing.parser import ToolParser
from text.parsing.reader import Steps, copy_value
from text.tools import Tool

_PYTHON_TAG = "<|python_tag|>"
_CALLS = "[TOOL_CALLS]"
_CALL_ID = "[CALL_ID]"
_ARGS = "[ARGS]"
_NAME = re.compile(r"[\w.-]+", re.ASCII)
_ID_LENGTH = 9
_ID_CHARACTERS = string.ascii_letters + string.digits


class MarkedParser(ToolParser):
    """Parses an object or a list of them behind a marker, anywhere in the answer; the last closing marker may be missing."""

    markers: ClassVar[Mapping[str, str]]
    """Text before a call, or a list of calls → text behind it."""
    wrapper: ClassVar[tuple[str, str] | None] = None
    """Tags that may enclose the answer itself."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._is_wrapped = False

    def _read(self) -> Steps[None]:
        reader = self._reader
        # Without tools, calls are text.
        markers = list(self.markers if self._tools or not self.is_envelope else ())
        if self.wrapper:
            reader.hold()
            yield from reader.skip_space()
            if (yield from reader.skip(self.wrapper[0])):
                reader.release()
                self._is_wrapped = True
                yield from reader.skip_space()
                markers.append(self.wrapper[1])
            else:
                reader.rewind()
        if markers:
            yield from self._read_marked(markers, self._read_calls)
        yield from reader.copy_rest(self._content)

    def _read_calls(self, marker: str) -> Steps[None]:
        reader = self._reader
        if marker not in self.markers:
            if self._is_wrapped:
                reader.release()
            self._is_wrapped = False
            return
        yield from reader.skip_space()
        if (yield from reader.skip("[")):
            yield from self._read_list()
        else:
            yield from self._read_object()
        if not reader.is_held:
            yield from reader.skip_space()
            yield from reader.skip(self.markers[marker])


class HermesParser(MarkedParser):
    """Parses the calls of Hermes 2 Pro, Qwen 2.5 and Qwen 3."""

    tags = ("<tool_call>", "</tool_call>")
    markers = MappingProxyType({"<tool_call>": "</tool_call>"})


class NemotronParser(MarkedParser):
    """Parses the calls of Nemotron Nano 2."""

    tags = ("<TOOLCALL>", "</TOOLCALL>")
    markers = MappingProxyType({"<TOOLCALL>": "</TOOLCALL>"})


class PhiParser(MarkedParser):
    """Parses the calls of Phi-4-mini, which its template marks by tokens, and that of vLLM's examples by a word."""

    tags = ("<|tool_call|>", "<|/tool_call|>")
    markers = MappingProxyType({"<|tool_call|>": "<|/tool_call|>", "functools": ""})


class ErnieParser(MarkedParser):
    """Parses the calls of Ernie 4.5, and removes the tags around its answer."""

    tags = ("<tool_call>", "</tool_call>", "<response>", "</response>")
    markers = MappingProxyType({"<tool_call>": "</tool_call>"})
    wrapper = ("<response>", "</response>")
    is_envelope = True


class GraniteParser(MarkedParser):
    """Parses the calls of Granite 3, and removes the tags around its answer."""

    tags = ("<|tool_call|>", "<tool_call>", "</tool_call>")
    markers = MappingProxyType({"<|tool_call|>": "", "<tool_call>": "</tool_call>"})
    wrapper = ("<response>", "</response>")
    is_envelope = True


class HunyuanParser(MarkedParser):
    """Parses the calls of Hunyuan A13B, and removes the tags around its answer."""

    tags = ("<tool_calls>", "</tool_calls>", "<answer>", "</answer>")
    markers = MappingProxyType({"<tool_calls>": "</tool_calls>"})
    wrapper = ("<answer>", "</answer>")
    is_envelope = True


class Llama3Parser(ToolParser):
    """Parses calls after the tag, or at the answer's beginning if they name an offered tool.

    An answer that is JSON but not a call stays content.
    """

    tags: ClassVar[tuple[str, ...]] = (_PYTHON_TAG,)

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
    def new_call_id(name: str, index: int) -> str:
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
