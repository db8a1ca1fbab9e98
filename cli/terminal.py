"""The input and output of a chat: a terminal with line editing, or a pipe that gets only the answers.

While ``input`` waits for a key, signals are handled promptly (``prompt_signals``). ``input`` with readline waits in its own
select(2). A signal that arrives just before that sets Python's flag but does not interrupt the wait, so its handler would
run only at the next key: SIGTERM would end nothing. Here a thread is notified of every signal through the wake-up file
descriptor and interrupts the wait with a signal that has no effect of its own.
"""

import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from io import TextIOWrapper
from typing import NoReturn, Protocol, TextIO

_NUDGE = signal.SIGURG
_NUDGE_AFTER_SECONDS = (0.02, 0.2, 1.0)
_PROMPT = "> "
_MORE = "… "
_SHOWN = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Replacements for control characters, so that a model's answer cannot control the terminal."""


def printable(text: str, stream: TextIO) -> str:
    """Return untrusted text as it may be printed: control characters are replaced if ``stream`` is a terminal."""
    return text.translate(_SHOWN) if stream.isatty() else text


class _LineReader(Protocol):
    def __call__(self, prompt: str, /) -> str: ...


def _read_message(read_line: _LineReader) -> str | None:
    """Read one message, which continues after a line that ends with a backslash; None at the end of the input."""
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
    """A person at a terminal. readline gives line editing, a history, and pasting of several lines."""

    is_interactive = True

    def __init__(self) -> None:
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")
        self._is_line_open = False

    def read(self) -> str | None:
        """Read the next message, None when the user leaves with Ctrl-D. Ctrl-C discards the typed line."""
        while True:
            try:
                with prompt_signals():
                    message = _read_message(input)
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit leaves)")
                continue
            if message is None:
                print()
            return message

    def write(self, piece: str) -> None:
        """Write a piece of an answer and flush it."""
        self._is_line_open = True
        print(printable(piece, sys.stdout), end="", flush=True)

    def end_line(self) -> None:
        """End the line of a finished answer."""
        self._is_line_open = False
        print(flush=True)

    def show(self, text: str) -> None:
        """Print the output of a command."""
        print(printable(text, sys.stdout), flush=True)

    def remark(self, text: str) -> None:
        """Print a remark for a person."""
        print(printable(f"({text})", sys.stdout), flush=True)

    def on_interrupt(self) -> None:
        """Mark an answer as stopped by Ctrl-C."""
        self._is_line_open = False
        print("\n(stopped)", flush=True)

    def show_error(self, text: str) -> None:
        """Print an error in one line; the session continues."""
        if self._is_line_open:
            self.end_line()
        print(printable(f"kvbaton: {text}", sys.stderr), file=sys.stderr, flush=True)


class Pipe:
    """A program that writes one message per line and reads the answers; errors go to standard error."""

    is_interactive = False

    def __init__(self, source: TextIO, target: TextIO) -> None:
        self._source = source
        self._target = target
        self._is_line_open = False

    def read(self) -> str | None:
        """Read the next message, None at the end of the input."""
        return _read_message(self._read_line)

    def _read_line(self, _prompt: str) -> str:
        line = self._source.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n").removesuffix("\r")

    def write(self, piece: str) -> None:
        """Write a piece of an answer and flush it."""
        self._is_line_open = True
        print(piece, end="", file=self._target, flush=True)

    def end_line(self) -> None:
        """End the line of a finished answer."""
        self._is_line_open = False
        print(file=self._target, flush=True)

    def show(self, text: str) -> None:
        """Print the output of a command."""
        print(text, file=self._target, flush=True)

    def remark(self, text: str) -> None:
        """Ignore the remark: a program does not read it."""

    def on_interrupt(self) -> NoReturn:
        """End a piped chat on Ctrl-C."""
        raise KeyboardInterrupt

    def show_error(self, text: str) -> None:
        """Print an error in one line; the next message is sent nevertheless."""
        if self._is_line_open:
            self.end_line()
        print(printable(f"kvbaton: {text}", sys.stderr), file=sys.stderr, flush=True)


def replace_unencodable() -> None:
    """Make the standard streams replace characters that their encoding does not have, instead of raising an error."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextlib.contextmanager
def prompt_signals() -> Iterator[None]:
    """Run signal handlers soon within the block, also if the main thread is about to wait. Main thread only."""
    ours, signals = socket.socketpair()
    signals.setblocking(False)
    earlier_handler = signal.signal(_NUDGE, lambda *_: None)
    earlier_fd = signal.set_wakeup_fd(signals.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_nudge, args=(ours, threading.get_ident()), name="prompt-signals")
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier_fd)
        signals.close()
        thread.join()
        signal.signal(_NUDGE, earlier_handler)


def _nudge(signals: socket.socket, main_thread: int) -> None:
    """Interrupt ``main_thread`` a few times after each signal, until the other end is closed."""
    with signals:
        waits: list[float] = []
        while True:
            signals.settimeout(waits[0] if waits else None)
            try:
                received = signals.recv(1)
            except TimeoutError:
                waits.pop(0)
                signal.pthread_kill(main_thread, _NUDGE)
                continue
            if not received:
                return
            # Several times: the main thread may not have reached its wait yet when the first one arrives.
            if received[0] != _NUDGE:
                waits = list(_NUDGE_AFTER_SECONDS)
