"""One Attach call: the stream between a worker and a router, from the registration to its end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio

from contract.membership import Welcome
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from wire.membership import welcome_from_proto

_ACKNOWLEDGE_SECONDS = 0.01


class Attachment:
    """One Attach call. Owns the messages that the router has not read yet.

    accepted: the router's acceptance; empty until then. has_router_left: the router has sent goodbye.
    has_bad_number: one side has ended the call because of a number that the other one has sent.
    num_unread_bytes: size of the unread messages; above ``max_unread_bytes`` the call is cancelled.
    Every message carries the number of the router's orders that were carried out.
    """

    def __init__(self, registration: pb.Registration, max_unread_bytes: int) -> None:
        self.accepted = Welcome()
        self.has_router_left = False
        self.has_bad_number = False
        self.num_unread_bytes = 0
        self._registration = registration
        self._max_unread_bytes = max_unread_bytes
        self._outbox: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue()
        self._call: Any = None
        self._num_orders = 0
        self._acknowledgement: asyncio.TimerHandle | None = None

    @property
    def is_overfull(self) -> bool:
        """True if the router has left more than ``max_unread_bytes`` unread."""
        return self.num_unread_bytes > self._max_unread_bytes

    def send(self, message: pb.WorkerMessage) -> None:
        """Queue a message for the router; cancel the call if too much is unread."""
        message.num_orders = self._num_orders
        if self._acknowledgement:
            self._acknowledgement.cancel()
            self._acknowledgement = None
        self._outbox.put_nowait(message)
        self.num_unread_bytes += message.ByteSize()
        if self.is_overfull:
            self._call.cancel()

    async def run(
        self,
        channel: grpc.aio.Channel,
        on_accepted: Callable[[], None],
        on_message: Callable[[pb.RouterMessage], Awaitable[None]],
    ) -> None:
        """Register and read the router's messages until the stream ends.

        ``on_accepted`` is called when the worker is registered, ``on_message`` for each later message except the last one;
        the next message is read when it has returned.

        Raises AioRpcError if the call fails, CancelledError if it was cancelled because the router does not read.
        """
        self._call = worker_pb2_grpc.MembershipStub(channel).Attach(self._messages())
        try:
            async for message in self._call:
                match message.WhichOneof("message"):
                    case "welcome":
                        self.accepted = welcome_from_proto(message.welcome)
                        on_accepted()
                    case "goodbye":
                        self.has_router_left = True
                    case _:
                        await on_message(message)
                        self._count(len(message.orders.orders))
        finally:
            if self._acknowledgement:
                self._acknowledgement.cancel()
            # A call that has ended does not end the task that takes messages for it.
            self._outbox.put_nowait(None)

    def _count(self, num_orders: int) -> None:
        """Count orders that were carried out. The next message reports them, within a hundredth of a second."""
        self._num_orders += num_orders
        if num_orders and self._acknowledgement is None:
            loop = asyncio.get_running_loop()
            self._acknowledgement = loop.call_later(_ACKNOWLEDGE_SECONDS, self.send, pb.WorkerMessage())

    async def _messages(self) -> AsyncIterator[pb.WorkerMessage]:
        yield pb.WorkerMessage(registration=self._registration)
        while (message := await self._outbox.get()) is not None:
            yield message
            if message.HasField("goodbye"):
                return
            self.num_unread_bytes -= message.ByteSize()
