"""Llama 3.1 to 3.3: ``{"name": …, "parameters": {…}}`` as the whole answer; several are separated by semicolons."""

from collections.abc import Callable

from text.parsing.parser import ToolParser
from text.parsing.reader import Steps

_PYTHON_TAG = "<|python_tag|>"


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
