"""How many requests of one client are being started at workers at the same time.

A start is a call to each of its workers, which takes the router and the worker about a millisecond each. A burst of a
hundred of one client's would stand before everybody else's at the worker's door. So the next ones are sent when the first
ones have been accepted; and beside other clients only after a rest, so that starts leave most of the time to them.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from router.throttling import pause_seconds

_MAX_STARTING = 4
"""For each worker that decodes."""
_PATIENCE_SECONDS = 0.05
"""A call that takes longer no longer holds up its client's next one: its worker may be dead."""


class StartLimiter:
    """Owns the count of what is being started, by client. on_accepted: called when a client may start requests again.

    num_workers: that decode.
    """

    def __init__(self, on_accepted: Callable[[], None]) -> None:
        self.num_workers = 1
        self._on_accepted = on_accepted
        self._starting: Counter[str] = Counter()

    def may_start(self, client: str) -> bool:
        """Return whether another request of this client may be started now."""
        return self._starting[client] < _MAX_STARTING * max(1, self.num_workers)

    def add(self, client: str, calls: Collection[asyncio.Task[Any]], *, is_alone: bool) -> None:
        """Count a request until its calls are done, or have taken too long. is_alone: there is no other client."""
        if all(call.done() for call in calls):
            return
        self._starting[client] += 1
        left = set(calls)
        loop = asyncio.get_running_loop()
        began = loop.time()

        def ended(call: asyncio.Task[Any] | None = None) -> None:
            left.difference_update([call] if call else calls)
            if not left and not timer.cancelled():
                timer.cancel()
                if is_alone:
                    self._leave(client)
                else:
                    loop.call_later(pause_seconds(loop.time() - began), self._leave, client)

        timer = loop.call_later(_PATIENCE_SECONDS, ended)
        for call in calls:
            call.add_done_callback(ended)

    def _leave(self, client: str) -> None:
        was_full = not self.may_start(client)
        self._starting[client] -= 1
        if not self._starting[client]:
            del self._starting[client]
        if was_full:
            self._on_accepted()
