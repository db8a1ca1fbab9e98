"""A signal that came just before the wait of ``input`` interrupts it all the same."""

import select
import signal
import socket
from types import FrameType

import pytest

from cli.prompt_signals import heard_signals


class Heard(Exception):  # noqa: N818
    """The handler ran."""


def _raise(_number: int, _frame: FrameType | None) -> None:
    raise Heard


def test_a_wait_after_the_signal_is_interrupted_as_well() -> None:
    """The handler has run before the wait begins, as if the signal had come too early: a nudge ends the wait."""
    ours, theirs = socket.socketpair()

    def tell(_number: int, _frame: FrameType | None) -> None:
        theirs.send(b".")

    earlier = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with ours, theirs, heard_signals():
            signal.signal(signal.SIGURG, tell)
            signal.raise_signal(signal.SIGUSR1)
            assert select.select([ours], [], [], 30)[0]
    finally:
        signal.signal(signal.SIGUSR1, earlier)


def test_a_handler_that_raises_leaves_everything_as_it_was() -> None:
    earlier, fd = signal.signal(signal.SIGUSR1, _raise), signal.set_wakeup_fd(-1)
    try:
        with pytest.raises(Heard), heard_signals():
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, earlier)
    assert signal.set_wakeup_fd(fd) == -1
    assert signal.getsignal(signal.SIGURG) == signal.SIG_DFL
