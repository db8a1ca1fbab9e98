"""Text that comes in pieces, read as if it were whole.

Everything that may have to wait for text is a generator that yields where it needs more, and goes on when there is
more or when the text has ended. So a format is written down in the order in which it is read, and where the pieces were
cut makes no difference.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from text.stop import num_held_back

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Yields where more text is needed; its result is T."""
Write = Callable[[str], None]

SPACE = " \t\r\n"
MAX_SPACE = 64
"""Characters of white space before markup that can belong to it; what is longer is text, and nobody waits for its end."""
_SPACES = re.compile(f"[{SPACE}]+")


class Reader:
    """Owns the text that has come and not been read, and on demand what was read since ``hold``."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._held_from: int | None = None
        self.is_ended = False
        """No more text will come."""

    def add(self, text: str) -> None:
        """More text has come."""
        start = self._at if self._held_from is None else self._held_from
        self._text = self._text[start:] + text
        self._at -= start
        self._held_from = None if self._held_from is None else 0

    @property
    def is_held(self) -> bool:
        """What is read is kept, because it may have to be given back."""
        return self._held_from is not None

    @property
    def held(self) -> str:
        """What was read since ``hold``."""
        return "" if self._held_from is None else self._text[self._held_from : self._at]

    def hold(self) -> None:
        """Keep what is read from here on."""
        self._held_from = self._at

    def release(self) -> str:
        """What was read since ``hold``; it is not kept any longer."""
        held = self.held
        self._held_from = None
        return held

    def peek(self) -> Steps[str]:
        """The next character, not read; empty at the end of the text."""
        while self._at == len(self._text) and not self.is_ended:
            yield
        return self._text[self._at : self._at + 1]

    def take(self, pattern: re.Pattern[str]) -> str:
        """Read what matches here of the text that has come; empty where nothing does."""
        match = pattern.match(self._text, self._at)
        return self._read(len(match[0])) if match else ""

    def take_all(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read what matches here, once and again, up to a character that does not."""
        found = ""
        while (yield from self.peek()) and (more := self.take(pattern)):
            found += more
        return found

    def skip_space(self) -> Steps[str]:
        """Read white space; it is the result."""
        return (yield from self.take_all(_SPACES))

    def skip(self, literal: str) -> Steps[bool]:
        """Read exactly this text, if it stands here; read nothing otherwise."""
        while True:
            found = self._text[self._at : self._at + len(literal)]
            if found == literal:
                self._read(len(literal))
                return True
            if self.is_ended or not literal.startswith(found):
                return False
            yield

    def copy_until(self, markers: Sequence[str], write: Write, *, trim: str = SPACE) -> Steps[str | None]:
        """Read up to the first of ``markers``, or of the ``trim`` characters before it, and write it out as it comes.

        There are MAX_SPACE of those at most. The result is the marker, which is not read; None where the text ends
        first: then all of it was written.
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
        """Read to the end of the text and write it out as it comes."""
        while (yield from self.peek()):
            write(self._read(len(self._text) - self._at))

    def _read(self, length: int) -> str:
        self._at += length
        return self._text[self._at - length : self._at]


def _length_without(trim: str, text: str) -> int:
    end = text[-MAX_SPACE:]
    return len(text) - len(end) + len(end.rstrip(trim))
