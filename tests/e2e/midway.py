"""Answers that are streamed at the same time, and a death in the middle of them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

_EVENTS_BEFORE = 20


async def with_a_death(
    num_streams: int,
    ask: Callable[[Callable[[str], None]], Awaitable[T]],
    kill: Callable[[], Awaitable[None]],
) -> T:
    """What ``ask`` gives; ``kill`` is called when so many events have come of its streams, on average.

    Of each would be too much: tokens that wait for one before them come as one event. ask: tells its argument of each event
    whose it is. Fails where the answers end before their middle.
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
            raise AssertionError(f"the answers ended with {num_events} events: too few for a middle")
        await kill()
        return await asking
    finally:
        asking.cancel()
        waiting.cancel()
