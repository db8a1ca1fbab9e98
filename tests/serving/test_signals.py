"""Signals end what they find, also where native code drops their exception, or where an error follows from them."""

import asyncio
import os
import signal
import sys

import pytest

from contract.errors import UnavailableError
from launch.local_cluster import run_until_signal
from serving.signals import STOP_SIGNALS, Terminated, raising


class Dropping:
    """An object whose end raises what a signal raises; Python drops that, as native code may do."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_whose_exception_is_dropped_ends_the_block(capsys: pytest.CaptureFixture[str]) -> None:
    """Before, the import of a command went on, and the command with it."""
    hook = sys.unraisablehook
    with pytest.raises(Terminated), raising(*STOP_SIGNALS):
        Dropping()
    assert sys.unraisablehook is hook
    assert capsys.readouterr().err == ""


def test_other_exceptions_that_are_dropped_are_shown() -> None:
    shown: list[str] = []
    hook = sys.unraisablehook

    class Broken:
        def __del__(self) -> None:
            raise ValueError("a bug")

    sys.unraisablehook = lambda args: shown.append(str(args.exc_value))
    try:
        with raising(*STOP_SIGNALS):
            Broken()
    finally:
        sys.unraisablehook = hook
    assert shown == ["a bug"]


def test_an_error_that_follows_from_a_signal_is_not_the_outcome() -> None:
    """The service that a command uses is stopped by the signal, too, so that it does not answer any more."""

    async def serve(stopped: asyncio.Event, _use: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await stopped.wait()
        raise UnavailableError("the service does not answer")

    async def never(_running: object, _stopped: asyncio.Event) -> None:
        raise AssertionError

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run_until_signal(serve, never))
