"""A limit on how many requests of one client are being started at workers at the same time.

A start is an order to each worker of the request, which takes the router and the worker a part of a millisecond each. If a
client's hundred requests were sent at once, the requests of other clients would wait behind all of these orders. Therefore
the next ones are sent when the first ones have left the router, and beside other clients only after a pause.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

from router.throttling import pause_seconds

_MAX_STARTING = 4
"""Starts of one client at a time, for each worker that decodes."""
_TIMEOUT_SECONDS = 0.05
"""After this time a start does not delay its client's next one any more: its worker may be dead."""


class Start:
    """The start of one request. It counts until its orders were sent, until it is given up, or for ``_TIMEOUT_SECONDS``.

    num_orders: orders that are still to be sent.
    """

    def __init__(self, on_end: Callable[[float], None]) -> None:
        loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._began = loop.time()
        self.num_orders = 0
        self._timer: asyncio.TimerHandle | None = loop.call_later(_TIMEOUT_SECONDS, self.end)

    def sent(self) -> None:
        """Record that one of the orders was sent."""
        self.num_orders -= 1
        if not self.num_orders:
            self.end()

    def end(self) -> None:
        """Stop counting. Does nothing the second time."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
            self._on_end(asyncio.get_running_loop().time() - self._began)


class StartLimiter:
    """Owns the number of starts, by client. on_free: called when a client may start requests again.

    num_workers: workers that decode.
    """

    def __init__(self, on_free: Callable[[], None]) -> None:
        self.num_workers = 1
        self._on_free = on_free
        self._starting: Counter[str] = Counter()

    def may_start(self, client: str) -> bool:
        """Return True if another request of this client may be started now."""
        return self._starting[client] < _MAX_STARTING * max(1, self.num_workers)

    def start(self, client: str, *, is_alone: bool) -> Start:
        """Count the start of a request. is_alone: there is no other client, so that no pause follows."""
        self._starting[client] += 1

        def end(seconds: float) -> None:
            if is_alone:
                self._leave(client)
            else:
                asyncio.get_running_loop().call_later(pause_seconds(seconds), self._leave, client)

        return Start(end)

    def _leave(self, client: str) -> None:
        was_full = not self.may_start(client)
        self._starting[client] -= 1
        if not self._starting[client]:
            del self._starting[client]
        if was_full:
            self._on_free()
