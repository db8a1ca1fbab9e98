"""SIGTERM and SIGINT: as an event that a service waits for, and as an exception that ends everything else.

A command has one of three states. Outside of an event loop, SIGTERM raises ``Terminated`` as SIGINT raises KeyboardInterrupt
(``raising``). In an event loop, the first of both cancels the main task (``run``; asyncio does so for SIGINT). A
service that stops in an order of its own waits for an event (``until_stopped``).
"""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any, NoReturn, TypeVar

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
T = TypeVar("T")
_LOOK_SECONDS = 0.5


class Terminated(KeyboardInterrupt):
    """SIGTERM has arrived. Like KeyboardInterrupt, it is no Exception, and event loops let it through."""


class StopEvent(asyncio.Event):
    """Set by the first signal; the second one sets ``at_once``, which ends the drain.

    number: the first signal; None if the event was set otherwise, or not at all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.at_once = asyncio.Event()
        self.number: int | None = None

    def signal(self, number: int) -> None:
        """Handle a signal."""
        if self.is_set():
            self.at_once.set()
        else:
            self.number = number
        self.set()

    def raise_signal(self) -> None:
        """Raise the exception of the signal that has set the event, if one has: the work was not finished."""
        if self.number is not None:
            raise exception_of(self.number)


def exception_of(number: int) -> KeyboardInterrupt:
    """Return the exception that stands for a signal."""
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


@contextmanager
def raising(*numbers: signal.Signals) -> Iterator[None]:
    """Make these signals raise their exceptions within the block, so that its ``finally`` clauses run. Main thread only.

    Any other exception that ends the block after a signal stands for the signal, and so does a block that ends as if there
    had been none: native code that an exception interrupts, such as pydantic's while it builds a class, raises one of its
    own, or drops it.
    """
    arrived: list[int] = []
    earlier_hook = sys.unraisablehook

    def ignore_signals(unraisable: "sys.UnraisableHookArgs") -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            earlier_hook(unraisable)

    def raise_signal(number: int, _frame: FrameType | None) -> NoReturn:
        arrived.append(number)
        raise exception_of(number)

    earlier = {number: signal.signal(number, raise_signal) for number in numbers}
    sys.unraisablehook = ignore_signals
    try:
        yield
        if arrived:
            raise exception_of(arrived[0])
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if arrived:
            raise exception_of(arrived[0]) from error
        raise
    finally:
        sys.unraisablehook = earlier_hook
        for number, handler in earlier.items():
            signal.signal(number, handler)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that SIGTERM and SIGINT cancel, and raise the signal's exception then. Main thread only."""

    async def run_until_sigterm() -> T:
        task = asyncio.current_task()
        assert task is not None
        is_terminated = False

        def terminate(_number: int) -> None:
            nonlocal is_terminated
            is_terminated = True
            task.cancel()

        with _handle((signal.SIGTERM,), terminate):
            try:
                return await main
            except asyncio.CancelledError:
                if is_terminated:
                    raise Terminated from None
                raise

    return asyncio.run(run_until_sigterm())


def result_of(future: Future[T]) -> T:
    """Return the result of another thread's work, or raise its error. A signal is handled within half a second."""
    # The system may deliver a signal to any thread, and Python handles it in the main thread: a wait without an end would
    # not notice it.
    while not future.done():
        wait([future], timeout=_LOOK_SECONDS)
    return future.result()


@asynccontextmanager
async def until_stopped() -> AsyncIterator[StopEvent]:
    """Make SIGTERM and SIGINT set the event instead of ending the process, within the block. Main thread only."""
    stopped = StopEvent()
    with _handle(STOP_SIGNALS, stopped.signal):
        yield stopped


@contextmanager
def _handle(numbers: tuple[signal.Signals, ...], handle: Any) -> Iterator[None]:
    """Let the running event loop handle these signals within the block; the earlier handlers are set again then."""
    loop = asyncio.get_running_loop()
    earlier = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, earlier[number])
