"""Untrusted text does not control the terminal that shows it."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from cli.ask import Answer
from cli.main import run_command
from cli.run import _show
from cli.terminal import Pipe, Terminal

STEERING = "\x1b]0;owned\x07\x9b2Jgone\ttab\nline"
HARMLESS = "\ufffd]0;owned\ufffd\ufffd2Jgone\ttab\nline"


class Screen(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@contextmanager
def on_screen() -> Iterator[Screen]:
    """Return the text of both streams."""
    screen = Screen()
    with redirect_stdout(screen), redirect_stderr(screen):
        yield screen


def test_every_way_to_a_terminal_is_harmless() -> None:
    """L1: answers of run, and every kind of line in a chat."""
    with on_screen() as screen:
        terminal = Terminal()
        _show(Answer(STEERING, "stop", 1, 1, {}))
        terminal.write(STEERING)
        terminal.end_line()
        terminal.show(STEERING)
        terminal.remark(STEERING)
        terminal.show_error(STEERING)
    assert not set(screen.getvalue()) & {"\x1b", "\x07", "\x9b"}
    assert screen.getvalue().count(HARMLESS) == 5


def test_an_error_of_a_command_is_harmless() -> None:
    """L1: it may quote a file or a server."""
    with on_screen() as screen:
        assert run_command([STEERING]) == 2
    assert "\x1b" not in screen.getvalue() and "unknown command" in screen.getvalue()


def test_a_pipe_gets_the_answer_as_it_is() -> None:
    """A program that reads it may need every character."""
    target = io.StringIO()
    Pipe(io.StringIO(), target).write(STEERING)
    assert target.getvalue() == STEERING
