"""SIGTERM and SIGINT as an event that a service waits for."""

import asyncio
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopEvent(asyncio.Event):
    """Set by the first signal; the second one sets ``at_once``, which ends the drain."""

    def __init__(self) -> None:
        super().__init__()
        self.at_once = asyncio.Event()

    def signal(self) -> None:
        """Handle a signal."""
        if self.is_set():
            self.at_once.set()
        self.set()


@asynccontextmanager
async def until_stopped() -> AsyncIterator[StopEvent]:
    """Make SIGTERM and SIGINT set the event instead of ending the process, within the block. Main thread only."""
    stopped = StopEvent()
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stopped.signal)
    try:
        yield stopped
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


async def ends_within(waiting: Coroutine[Any, Any, Any], seconds: float, at_once: asyncio.Event) -> bool:
    """Run ``waiting`` for ``seconds``, or until ``at_once``; return whether it has ended by itself. Raises its error."""
    ending = asyncio.create_task(waiting, name="wait for the end of a drain")
    waits = [ending, asyncio.create_task(at_once.wait(), name="wait for a second signal")]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        has_ended = ending.done()
    finally:
        for task in waits:
            task.cancel()
        await asyncio.wait(waits)
    if has_ended:
        ending.result()
    return has_ended
