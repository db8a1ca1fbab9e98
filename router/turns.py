"""Limits how many requests of a client begin at once, so that a burst of one client does not delay the others.

What begins a request (a prompt to tokenize, a place in line, two calls to workers) takes about a millisecond of the event
loop. A hundred at once would hold up everything else that is ready by a tenth of a second. Here one request of each client
begins in each round of the loop.
"""

import asyncio
from collections import deque


class Turns:
    """Owns who waits for its turn, by client."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def take(self, client: str) -> None:
        """Wait until no other request of this client has begun in this round of the event loop."""
        if (waiting := self._waiting.get(client)) is not None:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting.append(turn)
            await turn
            return
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._next_round)
        self._waiting[client] = deque()

    def _next_round(self) -> None:
        for client, waiting in list(self._waiting.items()):
            while waiting and waiting[0].done():  # it was cancelled
                waiting.popleft()
            if waiting:
                waiting.popleft().set_result(None)
            else:
                del self._waiting[client]
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next_round)
