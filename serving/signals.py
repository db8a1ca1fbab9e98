"""SIGTERM and SIGINT as an event that a service waits for."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@asynccontextmanager
async def until_stopped() -> AsyncIterator[asyncio.Event]:
    """Within the block SIGTERM and SIGINT set the event instead of ending the process. Main thread only."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stopped.set)
    try:
        yield stopped
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
