"""The messages of a router to one worker, on the worker's stream: orders about requests, and those about the worker itself.

Nothing waits until a leg is accepted. The orders of one moment are sent as one message; the worker reports with whatever it
sends next how many orders it has carried out, and each leg that it rejects.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from contract.errors import DeadlineError, KvbatonError
from protos import worker_pb2 as pb
from wire.messages import BadNumberError

_MAX_BYTES = 2**20
"""Size of the starts in one message beyond which further ones are sent in the next message."""
_GATHER_SECONDS = 0.001
"""The time after a message with starts in which further ones are gathered: a message costs the router 60 µs."""
_MAX_CANCELS = 16
"""Cancels in one message.

A client that disconnects ends hundreds of answers at once, and the starts of other clients would wait behind their cancels.
"""


@dataclass(slots=True, eq=False)
class _Start:
    """A leg to start. since: when it was ordered. number: of the order, from 1; 0 until it is sent."""

    write: Callable[[pb.Order], object]
    since: float
    reject: Callable[[KvbatonError], None]
    on_sent: Callable[[], None]
    number: int = 0


@dataclass(slots=True)
class OrderCounts:
    """Orders since the worker's stream was opened: starts and cancels that were sent, and those that it has carried out."""

    sent: int = 0
    carried_out: int = 0


class OrderStream:
    """Owns what was not sent to one worker yet, and the starts that the worker has not carried out.

    A cancel is sent behind the starts that were ordered before it, so that it never arrives before the leg that it ends. A
    start that is not carried out within ``accept_timeout_seconds`` is rejected with a DeadlineError.
    """

    def __init__(self, worker: str, accept_timeout_seconds: float) -> None:
        self._worker = worker
        self._timeout = accept_timeout_seconds
        self._messages: deque[pb.RouterMessage] = deque()
        self._starts: deque[_Start] = deque()
        self._cancels: deque[pb.CancelRequest] = deque()
        self._awaited: deque[_Start] = deque()
        self.counts = OrderCounts()
        self._wake = asyncio.Event()
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None

    def send(self, message: pb.RouterMessage) -> None:
        """Send a message about the worker itself, before all orders that wait."""
        self._messages.append(message)
        self._wake.set()

    def start(
        self,
        write: Callable[[pb.Order], object],
        reject: Callable[[KvbatonError], None],
        on_sent: Callable[[], None],
    ) -> None:
        """Order a leg to be started. reject: called if the worker does not carry the order out in time.

        write: fills the order in when it is sent, since a part of a message is copied when it is added, with a whole prompt.
        """
        loop = asyncio.get_running_loop()
        start = _Start(write, loop.time(), reject, on_sent)
        self._starts.append(start)
        self._awaited.append(start)
        if self._timer is None:
            self._timer = loop.call_later(self._timeout, self._reject_late)
        self._wake.set()

    def cancel(self, request: pb.CancelRequest) -> None:
        """Order legs to be cancelled."""
        self._cancels.append(request)
        self._wake.set()

    def on_carried_out(self, num_orders: int) -> None:
        """Record that the worker has carried out so many orders since its stream was opened.

        Raises BadNumberError for more than were sent.
        """
        if num_orders > self.counts.sent:
            field = "WorkerMessage.num_orders"
            raise BadNumberError(f"{field} is {num_orders}; {self.counts.sent} were sent", param=field)
        self.counts.carried_out = max(self.counts.carried_out, num_orders)
        awaited = self._awaited
        # a start without a number was not sent yet, and none behind it was
        while awaited and 0 < awaited[0].number <= num_orders:
            awaited.popleft()

    def close(self) -> None:
        """End ``messages``, since the worker's stream ends; its legs fail with its loss. Does nothing the second time."""
        self._is_closed = True
        self._wake.set()
        self._awaited.clear()
        if self._timer:
            self._timer.cancel()

    async def messages(self) -> AsyncGenerator[pb.RouterMessage, None]:
        """Yield what is to be sent, until ``close``. A message counts as sent when the next one is asked for."""
        while not self._is_closed:
            await self._wake.wait()
            # before the messages are taken: an order that comes while one is sent wakes this again
            self._wake.clear()
            while not self._is_closed and (taken := self.next_message()):
                message, on_sent = taken
                yield message
                for sent in on_sent:
                    sent()
                if on_sent:
                    await asyncio.sleep(_GATHER_SECONDS)

    def next_message(self) -> tuple[pb.RouterMessage, list[Callable[[], None]]] | None:
        """Return the next message, and what to call when it was sent; None if there is nothing to send."""
        if self._messages:
            return self._messages.popleft(), []
        message = pb.RouterMessage()
        orders = message.orders.orders
        on_sent: list[Callable[[], None]] = []
        num_bytes = 0
        while self._starts and num_bytes < _MAX_BYTES:
            start = self._starts.popleft()
            self.counts.sent += 1
            start.number = self.counts.sent
            order = orders.add()
            start.write(order)
            on_sent.append(start.on_sent)
            num_bytes += order.ByteSize()
        # behind the starts: a cancel that arrives before its leg would end nothing, and the leg would run on
        num_cancels = 0 if self._starts else min(len(self._cancels), _MAX_CANCELS)
        self.counts.sent += num_cancels
        for _ in range(num_cancels):
            orders.add(cancel=self._cancels.popleft())
        return (message, on_sent) if orders else None

    def _reject_late(self) -> None:
        """Reject the starts that the worker should have carried out by now, and look again when the next one is due."""
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._awaited and (left := self._awaited[0].since + self._timeout - loop.time()) <= 0:
            self._awaited.popleft().reject(
                DeadlineError(
                    f"worker {self._worker} has not accepted the request within {self._timeout:g} s"
                )
            )
        if self._awaited and not self._is_closed:
            self._timer = loop.call_later(left, self._reject_late)
