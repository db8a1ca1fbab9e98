"""Limits how many requests of a client begin at once, so that a burst of one client does not delay the others.

What begins a request (a prompt to tokenize, a place in line, two calls to workers, a task for each answer) takes a
millisecond or more of the event loop. A hundred at once would hold up everything else that is ready by a tenth of a second.
Here one request of each client begins in a round of the loop; and while several clients are there, a round begins when the
loop has been left to others for a while.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from router.recent_clients import RecentClients
from router.throttling import pause_seconds

RECENT_SECONDS = 1.0
"""For how long after its last request a client counts as one that is there."""
_FACTOR = 2
"""How many times as long as the loop was busy since the round before no other round begins."""


class RoundRobin:
    """Owns who waits for its turn, by client.

    clock, cpu_clock: seconds, and those for which the event loop's thread was busy.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._cpu_clock = cpu_clock
        self._recent = RecentClients(RECENT_SECONDS, clock)
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._busy_before = 0.0

    async def take(self, client: str) -> None:
        """Wait until no other request of this client has begun in this round of the event loop."""
        self._recent.note(client)
        if (waiting := self._waiting.get(client)) is not None:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting.append(turn)
            await turn
            return
        if not self._waiting:
            asyncio.get_running_loop().call_later(self._seconds_to_rest(), self._next_round)
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
            asyncio.get_running_loop().call_later(self._seconds_to_rest(), self._next_round)

    def _seconds_to_rest(self) -> float:
        """Return how long after this round the next one begins: at once, where one client is alone."""
        busy = self._cpu_clock() - self._busy_before
        self._busy_before += busy
        is_alone = len(self._recent.names | self._waiting.keys()) < 2
        return 0.0 if is_alone else pause_seconds(busy, _FACTOR)
