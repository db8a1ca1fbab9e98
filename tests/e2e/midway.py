"""Concurrent streamed answers, and a worker that is killed in the middle of them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

_EVENTS_BEFORE = 20


async def kill_midway(
    num_streams: int,
    ask: Callable[[Callable[[str], None]], Awaitable[T]],
    kill: Callable[[], Awaitable[None]],
) -> T:
    """Return the result of ``ask``; call ``kill`` after 20 events for each stream on average.

    Not after 20 of each stream: tokens that wait for an earlier one come as one event. ask: calls its argument with a name
    for each event. Raises AssertionError if the answers end before their middle.
    """
    num_events, is_midway = 0, asyncio.Event()

    def count(_: str) -> None:
        nonlocal num_events
        num_events += 1
        if num_events >= _EVENTS_BEFORE * num_streams:
            is_midway.set()

    asking = asyncio.ensure_future(ask(count))
    waiting = asyncio.ensure_future(is_midway.wait())
    try:
        await asyncio.wait({asking, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            await asking
            raise AssertionError(f"the answers ended after {num_events} events: too few for a middle")
        await kill()
        return await asking
    finally:
        asking.cancel()
        waiting.cancel()
