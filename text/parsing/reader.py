"""Reads text that arrives in pieces as if it were complete.

Every function that may have to wait for text is a generator that yields when it needs more, and is resumed when there is
more or when the text has ended. A format is therefore written in the order in which it is read, and the boundaries of the
pieces do not matter.

"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from text.stop import num_held_back

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Yields when more text is needed; its result is T."""
Write = Callable[[str], None]

SPACE = " \t\r\n"
MAX_SPACE = 64
"""Limit of white space before markup that belongs to it; a longer one is text, and is not held back."""
_SPACES = re.compile(f"[{SPACE}]+")


class Reader:
    """Owns the text that has arrived and was not read, and on request the text read since ``hold``."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._held_from: int | None = None
        self.is_ended = False
        """True if no more text will arrive."""

    def add(self, text: str) -> None:
        """Add text that has arrived."""
        start = self._at if self._held_from is None else self._held_from
        self._text = self._text[start:] + text
        self._at -= start
        self._held_from = None if self._held_from is None else 0

    @property
    def is_held(self) -> bool:
        """True if the text read since ``hold`` is kept."""
        return self._held_from is not None

    @property
    def held(self) -> str:
        """The text read since ``hold``."""
        return "" if self._held_from is None else self._text[self._held_from : self._at]

    def hold(self) -> None:
        """Keep the text that is read from here on."""
        self._held_from = self._at

    def release(self) -> str:
        """Return the text read since ``hold``, and stop keeping it."""
        held = self.held
        self._held_from = None
        return held

    def peek(self) -> Steps[str]:
        """Return the next character without reading it; empty at the end of the text."""
        while self._at == len(self._text) and not self.is_ended:
            yield
        return self._text[self._at : self._at + 1]

    def take(self, pattern: re.Pattern[str]) -> str:
        """Read the match of the pattern at this position in the text that has arrived; empty if there is none."""
        match = pattern.match(self._text, self._at)
        return self._read(len(match[0])) if match else ""

    def take_all(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read consecutive matches of the pattern, up to a character that does not match."""
        found = ""
        while (yield from self.peek()) and (more := self.take(pattern)):
            found += more
        return found

    def skip_space(self) -> Steps[str]:
        """Read white space and return it."""
        return (yield from self.take_all(_SPACES))

    def skip(self, literal: str) -> Steps[bool]:
        """Read exactly this text and return True, or read nothing and return False."""
        while True:
            found = self._text[self._at : self._at + len(literal)]
            if found == literal:
                self._read(len(literal))
                return True
            if self.is_ended or not literal.startswith(found):
                return False
            yield

    def copy_until(self, markers: Sequence[str], write: Write, *, trim: str = SPACE) -> Steps[str | None]:
        """Read up to the first of ``markers``, or the ``trim`` characters before it, and write the text in pieces.

        At most MAX_SPACE characters are trimmed. Returns the marker, which is not read, or None if the text ends first; then
        all of it was written.
        """
        pattern = re.compile("|".join(map(re.escape, markers)))
        while True:
            text = self._text[self._at :]
            if match := pattern.search(text):
                write(self._read(_length_without(trim, text[: match.start()])))
                return match[0]
            if self.is_ended:
                write(self._read(len(text)))
                return None
            certain = text[: len(text) - num_held_back(text, markers)]
            write(self._read(_length_without(trim, certain)))
            yield

    def copy_rest(self, write: Write) -> Steps[None]:
        """Read to the end of the text and write it in pieces."""
        while (yield from self.peek()):
            write(self._read(len(self._text) - self._at))

    def _read(self, length: int) -> str:
        self._at += length
        return self._text[self._at - length : self._at]


def _length_without(trim: str, text: str) -> int:
    end = text[-MAX_SPACE:]
    return len(text) - len(end) + len(end.rstrip(trim))
