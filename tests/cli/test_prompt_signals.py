"""A signal that arrives just before ``input`` waits interrupts it as well."""

import select
import signal
import socket
from types import FrameType

import pytest

from cli.terminal import prompt_signals


class Handled(Exception):  # noqa: N818
    """The handler ran."""


def _raise(_number: int, _frame: FrameType | None) -> None:
    raise Handled


def test_a_wait_after_the_signal_is_interrupted_as_well() -> None:
    """The handler has run before the wait begins, as if the signal had been too early: a later signal ends the wait."""
    ours, theirs = socket.socketpair()

    def tell(_number: int, _frame: FrameType | None) -> None:
        theirs.send(b".")

    earlier = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with ours, theirs, prompt_signals():
            signal.signal(signal.SIGURG, tell)
            signal.raise_signal(signal.SIGUSR1)
            assert select.select([ours], [], [], 30)[0]
    finally:
        signal.signal(signal.SIGUSR1, earlier)


def test_a_handler_that_raises_leaves_everything_as_it_was() -> None:
    earlier, fd = signal.signal(signal.SIGUSR1, _raise), signal.set_wakeup_fd(-1)
    try:
        with pytest.raises(Handled), prompt_signals():
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, earlier)
    assert signal.set_wakeup_fd(fd) == -1
    assert signal.getsignal(signal.SIGURG) == signal.SIG_DFL
