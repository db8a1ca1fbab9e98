"""Finds out when a draining worker holds nothing any more, and when nothing is on its way to it either."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from contract.errors import UnavailableError
from engine.client import EngineClient

_ASK_AGAIN_SECONDS = 0.2
"""The time after which a router that has a leg on its way is asked again what it has bound."""


class Emptiness:
    """Watches one worker between ``watch`` and ``close``.

    is_empty: it holds no leg and lends no KV. Then its routers are asked what they have bound; ``wait_unbound`` ends when
    that is nothing. Without this a leg could be on its way, and would fail with the worker. num_legs: returns the number of
    legs that have not ended. is_bound: returns whether a router may have a leg bound to this worker. announce: sends a
    credit, to which each router answers what it has bound.
    """

    def __init__(
        self,
        engine: EngineClient,
        num_legs: Callable[[], int],
        is_bound: Callable[[], bool],
        announce: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._num_legs = num_legs
        self._is_bound = is_bound
        self._announce = announce
        self._empty = asyncio.Event()
        self._unbound = asyncio.Event()
        self._reported = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    @property
    def is_empty(self) -> bool:
        """True from the moment at which the worker was found to be empty."""
        return self._empty.is_set()

    def watch(self) -> None:
        """Begin, or begin again: the worker holds something."""
        self._stop()
        self._watch = asyncio.create_task(self._until_unbound(), name="watch whether the worker is empty")

    def close(self) -> None:
        """Stop watching, and forget what was found. Does nothing the second time."""
        self._stop()

    def _stop(self) -> None:
        if self._watch:
            self._watch.cancel()
            self._watch = None
        self._empty.clear()
        self._unbound.clear()

    def note_report(self) -> None:
        """Record that a router has reported what it has bound."""
        self._reported.set()

    async def wait_empty(self, seconds: float) -> bool:
        """Wait until the worker is empty, at most ``seconds``; return whether it is."""
        return await _is_set_within(self._empty, seconds)

    async def wait_unbound(self) -> None:
        """Wait until the worker is empty and no leg is bound to it."""
        await self._unbound.wait()

    async def _until_unbound(self) -> None:
        """Announce that the worker is empty, once it is, and wait for its routers.

        An engine that is gone holds nothing, and legs that are bound to it fail with the worker's streams.
        """
        has_engine = True
        try:
            await self._engine.until_free()
            while self._num_legs():  # legs whose last output is delivered, but not processed
                await self._engine.until_free()
        except UnavailableError:
            has_engine = False
        self._empty.set()
        self._announce()
        while has_engine and self._is_bound():
            self._reported.clear()
            if not await _is_set_within(self._reported, _ASK_AGAIN_SECONDS):
                self._announce()
        self._unbound.set()
        self._watch = None


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, at most ``seconds``; return whether it is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
