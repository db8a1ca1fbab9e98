"""Where a chat reads and writes: a terminal with line editing, or a pipe with nothing but the answers."""

import sys
from io import TextIOWrapper
from typing import NoReturn, Protocol, TextIO

from cli.prompt_signals import heard_signals

_PROMPT = "> "
_MORE = "… "
_SHOWN = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""A model's answer cannot steer the terminal: control characters are shown as what they are, unprintable."""


def printable(text: str, stream: TextIO) -> str:
    """Return a text that others wrote as it may be printed there: a terminal gets no control characters."""
    return text.translate(_SHOWN) if stream.isatty() else text


class _LineReader(Protocol):
    def __call__(self, prompt: str, /) -> str: ...


def _read_message(read_line: _LineReader) -> str | None:
    """One message, over several lines where one ends with a backslash; None at the end of the input."""
    lines: list[str] = []
    try:
        lines.append(read_line(_PROMPT))
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(read_line(_MORE))
    except EOFError:
        return "\n".join(lines) if lines else None
    return "\n".join(lines)


class Terminal:
    """A person at a terminal. Lines can be edited and called back (readline), and pasted with their line breaks."""

    is_interactive = True

    def __init__(self) -> None:
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")
        self._is_line_open = False

    def read(self) -> str | None:
        """The next message, None when the user leaves by Ctrl-D. Ctrl-C takes back what was typed."""
        while True:
            try:
                with heard_signals():
                    message = _read_message(input)
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit leaves)")
                continue
            if message is None:
                print()
            return message

    def write(self, piece: str) -> None:
        """A piece of an answer, at once."""
        self._is_line_open = True
        print(printable(piece, sys.stdout), end="", flush=True)

    def end_line(self) -> None:
        """The answer is over."""
        self._is_line_open = False
        print(flush=True)

    def show(self, text: str) -> None:
        """What the user asked for by a command."""
        print(printable(text, sys.stdout), flush=True)

    def say(self, text: str) -> None:
        """A remark that only a person needs."""
        print(printable(f"({text})", sys.stdout), flush=True)

    def stopped(self) -> None:
        """An answer was stopped by Ctrl-C."""
        self._is_line_open = False
        print("\n(stopped)", flush=True)

    def complain(self, text: str) -> None:
        """One line about what went wrong; the session goes on."""
        if self._is_line_open:
            self.end_line()
        print(printable(f"kvbaton: {text}", sys.stderr), file=sys.stderr, flush=True)


class Pipe:
    """A program that writes one message a line and reads the answers; errors go to standard error."""

    is_interactive = False

    def __init__(self, source: TextIO, target: TextIO) -> None:
        self._source = source
        self._target = target
        self._is_line_open = False

    def read(self) -> str | None:
        """The next message, None at the end."""
        return _read_message(self._read_line)

    def _read_line(self, _prompt: str) -> str:
        line = self._source.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n").removesuffix("\r")

    def write(self, piece: str) -> None:
        """A piece of an answer, at once."""
        self._is_line_open = True
        print(piece, end="", file=self._target, flush=True)

    def end_line(self) -> None:
        """The answer is over."""
        self._is_line_open = False
        print(file=self._target, flush=True)

    def show(self, text: str) -> None:
        """What was asked for by a command."""
        print(text, file=self._target, flush=True)

    def say(self, text: str) -> None:
        """Nothing: nobody is there to read remarks."""

    def stopped(self) -> NoReturn:
        """Ctrl-C ends a piped chat."""
        raise KeyboardInterrupt

    def complain(self, text: str) -> None:
        """One line about what went wrong; the next message is asked all the same."""
        if self._is_line_open:
            self.end_line()
        print(printable(f"kvbaton: {text}", sys.stderr), file=sys.stderr, flush=True)


def open_terminal() -> Terminal | Pipe:
    """What fits this process's standard input and output. Characters that they cannot show are replaced."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    if sys.stdin.isatty() and sys.stdout.isatty():
        return Terminal()
    return Pipe(sys.stdin, sys.stdout)
