"""Waits that a time limit, an event or a cancel may end."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def ends_within(waiting: Coroutine[Any, Any, Any], seconds: float, at_once: asyncio.Event) -> bool:
    """Run ``waiting`` for ``seconds``, or until ``at_once``; return whether it has ended by itself. Raises its error."""
    ending = asyncio.create_task(waiting, name="wait that may be ended")
    waits = [ending, asyncio.create_task(at_once.wait(), name="wait for the end of a wait")]
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


def is_being_cancelled() -> bool:
    """Return True if the running task is being cancelled. gRPC raises the same error for a call that was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
