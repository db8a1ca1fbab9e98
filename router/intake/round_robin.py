"""Limits how many requests of a client begin at once, so that a burst of one client does not delay the others.

To begin a request (tokenize a prompt, enter the queue, call two workers, make a task for each answer) takes a millisecond or
more of the event loop. A hundred at once would delay everything else that is ready by a tenth of a second.
Here one request of each client begins in a round of the loop. While several clients are active, the next round begins after
the loop has been left to others for a while. Of a client that is alone a few begin in a round, without a wait, so that their
orders to a worker are sent together.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from router.intake.limits import pause_seconds
from router.routing.running_shares import RecentClients

RECENT_SECONDS = 1.0
"""For how long after its last request a client counts as active."""
_MOST_ALONE = 8
"""Requests of a client that begin in a round while it is alone."""
_FACTOR = 2
"""The pause before the next round, as a multiple of the time for which the loop was busy since the last one."""


class RoundRobin:
    """Owns the requests that wait for their turn to begin, by client.

    clock, cpu_clock: seconds, and seconds for which the event loop's thread was busy.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._cpu_clock = cpu_clock
        self._recent = RecentClients(RECENT_SECONDS, clock)
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._num_begun = 0
        """Requests that have begun in this round."""
        self._busy_before = 0.0

    async def wait_turn(self, client: str) -> None:
        """Wait until no other request of this client has begun in this round of the event loop, or few if it is alone."""
        self._recent.note(client)
        if (waiting := self._waiting.get(client)) is None:
            if not self._waiting:
                self._schedule_round()
            self._waiting[client] = deque()
        elif waiting or self._num_begun >= _MOST_ALONE or not self._is_one_alone:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting.append(turn)
            await turn
            return
        self._num_begun += 1

    def _next_round(self) -> None:
        most = _MOST_ALONE if self._is_one_alone else 1
        self._num_begun = 0
        for client, waiting in list(self._waiting.items()):
            num_begun = 0
            while waiting and num_begun < most:
                turn = waiting.popleft()
                if not turn.done():  # else it was cancelled
                    turn.set_result(None)
                    num_begun += 1
            self._num_begun += num_begun
            # a client stays listed for the round after its last begin, by which ``wait_turn`` finds that it has begun
            # one
            if not num_begun:
                del self._waiting[client]
        if self._waiting:
            self._schedule_round()

    def _schedule_round(self) -> None:
        """Begin the next round after a pause; at once if one client is alone."""
        loop = asyncio.get_running_loop()
        if self._is_one_alone:
            loop.call_soon(self._next_round)
        else:
            # time of the thread, and not of the clock: waiting for events is no work that others were kept from; it takes
            # a system call, which one client alone need not pay for
            busy = self._cpu_clock() - self._busy_before
            self._busy_before += busy
            loop.call_later(pause_seconds(busy, _FACTOR), self._next_round)

    @property
    def _is_one_alone(self) -> bool:
        """True if at most one client is active."""
        names = self._recent.names
        return max(len(names), len(self._waiting)) < 2 and len(names | self._waiting.keys()) < 2
