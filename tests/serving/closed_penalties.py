"""Penalties whose turns a test decides."""

import asyncio

from serving.penalties import Penalties


class Closed(Penalties):
    """Let one address wait until ``is_open`` is set. has_waiter: set once one of its connections waits."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.is_open = asyncio.Event()
        self.has_waiter = asyncio.Event()
        self._closed = address

    def is_due(self, address: str) -> bool:
        """See Penalties."""
        return address == self._closed and not self.is_open.is_set()

    async def until_turn(self, address: str) -> None:
        """See Penalties."""
        self.has_waiter.set()
        await self.is_open.wait()
