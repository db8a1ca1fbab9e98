"""Hermes 2 Pro, Qwen 2.5 and Qwen 3: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` for each call."""

from text.parsing.parser import ToolParser
from text.parsing.reader import Steps

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


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
