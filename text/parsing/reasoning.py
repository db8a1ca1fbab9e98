"""Parses the reasoning before an answer: ``<think>…</think>``."""

from text.parsing.parser import TextParser
from text.parsing.pieces import Reasoning
from text.parsing.reader import Steps


class ReasoningParser(TextParser):
    """Separates the reasoning at an answer's beginning from the answer. White space beside the tags is dropped.

    tags: (opening, closing). is_reasoning: True while the text is in the reasoning; initially, if the prompt has opened it.
    """

    def __init__(self, opening: str, closing: str, *, is_reasoning: bool = False) -> None:
        super().__init__()
        self.tags = (opening, closing)
        self.is_reasoning = is_reasoning

    def _read(self) -> Steps[None]:
        reader = self._reader
        reader.hold()
        yield from reader.skip_space()
        is_opened = yield from reader.skip(self.tags[0])
        if is_opened or self.is_reasoning:
            reader.release()
            self.is_reasoning = True
            yield from self._read_reasoning()
        else:
            self._content(reader.release())
        yield from reader.copy_rest(self._content)

    def _read_reasoning(self) -> Steps[None]:
        reader = self._reader
        yield from reader.skip_space()
        yield from reader.copy_until([self.tags[1]], lambda text: self._emit(Reasoning(text)))
        yield from reader.skip_space()
        yield from reader.skip(self.tags[1])
        self.is_reasoning = False
        yield from reader.skip_space()
