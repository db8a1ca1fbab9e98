"""SIGTERM and SIGINT as an event that a service waits for."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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
