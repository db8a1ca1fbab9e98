"""Credit that is held for a request between the decision to admit it and the beginning of its legs.

A start is an order to each worker of the request, which takes the router and the worker a part of a millisecond each. If a
client's hundred requests were sent at once, the requests of other clients would wait behind all of these orders. Therefore
the next ones are sent when the first ones have left the router, and beside other clients only after a pause. More starts of
a client that is alone are sent together (``StartLimiter``).
"""

import asyncio
from collections.abc import Callable, Sequence

from router.intake.limits import pause_seconds
from router.routing.legs import Placement
from router.routing.policy import PlacementRequest
from router.workers.attached_worker import AttachedWorker
from router.workers.capacity import CreditHold

_MAX_STARTING = 4
"""Starts of one client at a time, for each worker that decodes."""
_MOST_ALONE = 8
"""Starts at a time of a client that was alone when it started its last request, for each worker that decodes."""
_TIMEOUT_SECONDS = 0.05
"""After this time a start does not delay its client's next one any more: its worker may be dead."""


class Start:
    """The start of one request. It counts until its orders were sent, until it is given up, or for ``_TIMEOUT_SECONDS``.

    Made by ``StartLimiter.start``. num_orders: orders that are still to be sent. is_alone: its client has started it while
    there was no other one.
    """

    def __init__(self, limiter: "StartLimiter", client: str, *, is_alone: bool) -> None:
        self.client = client
        self.is_alone = is_alone
        self.began = asyncio.get_running_loop().time()
        self.num_orders = 0
        self._limiter = limiter

    def on_order_sent(self) -> None:
        """Record that one of the orders was sent."""
        self.num_orders -= 1
        if not self.num_orders:
            self.end()

    def end(self) -> None:
        """Stop counting. Does nothing the second time."""
        self._limiter.end(self)


class StartLimiter:
    """Owns the open starts, oldest first. on_free: called when a client may start requests again.

    num_workers: workers that decode.
    """

    def __init__(self, on_free: Callable[[], None]) -> None:
        self.num_workers = 1
        self._on_free = on_free
        self._open: dict[Start, None] = {}
        self._starting: dict[str, int] = {}
        """Starts by client: the open ones, and those after which the client pauses."""
        self._is_alone = False
        self._timer: asyncio.TimerHandle | None = None

    def may_start(self, client: str) -> bool:
        """Return True if another request of this client may be started now."""
        most = _MOST_ALONE if self._is_alone else _MAX_STARTING
        return self._starting.get(client, 0) < most * max(1, self.num_workers)

    def start(self, client: str, *, is_alone: bool) -> Start:
        """Count the start of a request. is_alone: there is no other client, so that no pause follows."""
        start = Start(self, client, is_alone=is_alone)
        self._open[start] = None
        self._starting[client] = self._starting.get(client, 0) + 1
        self._is_alone = is_alone
        if self._timer is None:  # one timer for all: to make one and to cancel it takes microseconds
            self._timer = asyncio.get_running_loop().call_later(_TIMEOUT_SECONDS, self._end_late)
        return start

    def end(self, start: Start) -> None:
        """Stop counting a start, after a pause beside other clients. Does nothing the second time."""
        if start not in self._open:
            return
        del self._open[start]
        if start.is_alone:
            # alone, no other client waits for the time that a pause would leave
            self._leave(start.client)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(pause_seconds(loop.time() - start.began), self._leave, start.client)

    def _end_late(self) -> None:
        """End the starts that are older than ``_TIMEOUT_SECONDS``, and look again when the next one is."""
        loop = asyncio.get_running_loop()
        self._timer = None
        for start in list(self._open):
            # the oldest comes first, so the first one that is young enough ends the search
            if (left := start.began + _TIMEOUT_SECONDS - loop.time()) > 0:
                self._timer = loop.call_later(left, self._end_late)
                return
            self.end(start)

    def _leave(self, client: str) -> None:
        was_full = not self.may_start(client)
        if self._starting[client] > 1:
            self._starting[client] -= 1
        else:
            del self._starting[client]
        # only then can a request have been held back by this client's starts
        if was_full:
            self._on_free()


class Reservation:
    """A placement, and credit on its workers for the choices of a prompt that may begin.

    The admission queue makes it: from then on its later decisions count the credit as used, and ``start`` counts as one of
    the client's starts. The legs of the attempts take the credit over (``detach_holds``). What they have not taken is
    released when the reservation's block ends.

    workers: one for each leg of the placement. They are the incarnations that were chosen; some may have been lost since.
    """

    def __init__(
        self,
        placement: Placement,
        workers: Sequence[AttachedWorker],
        request: PlacementRequest,
        tenant: str,
        start: Start,
    ) -> None:
        self.placement = placement
        self.workers = tuple(workers)
        self._holds: list[list[CreditHold]] = []
        # each leg of each choice counts: the prompt once, each answer on the worker where it ends
        answer = [0] * (len(workers) - 1) + [request.num_answer_tokens]
        first = [request.num_prompt_tokens + num_tokens for num_tokens in answer]
        for tokens in [first, *[answer] * (request.num_choices - 1)]:
            # held at once: a decision later in the same round must not give the room away again
            legs = zip(workers, tokens, strict=True)
            self._holds.append([worker.capacity.hold(tenant, num_tokens) for worker, num_tokens in legs])
        self._start: Start | None = start

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def num_choices(self) -> int:
        """The choices of the prompt for which it holds credit that no leg has taken over."""
        return len(self._holds)

    @property
    def lost_workers(self) -> list[AttachedWorker]:
        """Workers that were lost after they had been chosen."""
        return [worker for worker in self.workers if worker.gone.is_set()]

    def detach_holds(self) -> list[list[CreditHold]]:
        """Return the credit of each choice, a hold for each leg. The legs release it from now on. Called once."""
        holds = self._holds
        self._holds = []
        return holds

    def begin(self, num_orders: int) -> Callable[[], None]:
        """Count the start until the orders that start the legs were sent. Return a function to call for each of them."""
        assert self._start is not None, "it has begun already"
        start = self._start
        self._start = None
        # from here on the orders end the start when they are sent, and ``release`` leaves it alone
        start.num_orders = num_orders
        return start.on_order_sent

    def release(self) -> None:
        """Give back the credit that no leg has taken, and end a start that was not begun. Does nothing the second time."""
        for holds in self.detach_holds():
            for hold in holds:
                hold.release()
        if self._start:
            self._start.end()
            self._start = None
