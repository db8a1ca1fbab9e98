"""One Attach call: the stream between a worker and its router, from the registration to its end."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from wire.membership import welcome_from_proto

logger = logging.getLogger(__name__)


class Attachment:
    """One Attach call. Owns the messages that the router has not read yet.

    session: the router's name for this stream; empty until the router accepts the worker. has_router_left: the router has
    sent goodbye. credit: returns what the router may bind now. on_order: receives all messages about the worker itself.
    num_unread_bytes: size of the unread messages; above ``max_unread_bytes`` the call is cancelled.
    """

    def __init__(
        self,
        registration: pb.Registration,
        credit: Callable[[], pb.Credit],
        on_order: Callable[[pb.RouterMessage], None],
        max_unread_bytes: int,
    ) -> None:
        self.session = ""
        self.has_router_left = False
        self.num_unread_bytes = 0
        self._registration = registration
        self._credit = credit
        self._on_order = on_order
        self._max_unread_bytes = max_unread_bytes
        self._outbox: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue()
        self._call: Any = None

    @property
    def is_overfull(self) -> bool:
        """True if the router has left more than ``max_unread_bytes`` unread."""
        return self.num_unread_bytes > self._max_unread_bytes

    def send(self, message: pb.WorkerMessage) -> None:
        """Queue a message for the router; cancel the call if too much is unread."""
        self._outbox.put_nowait(message)
        self.num_unread_bytes += message.ByteSize()
        if self.is_overfull:
            self._call.cancel()

    async def run(self, channel: grpc.aio.Channel, on_accepted: Callable[[], None]) -> None:
        """Register and read the router's messages until the stream ends; call ``on_accepted`` when registered.

        Raises AioRpcError if the call fails, CancelledError if it was cancelled because the router does not read.
        """
        self._call = worker_pb2_grpc.MembershipStub(channel).Attach(self._messages())
        try:
            async for message in self._call:
                self._receive(message, on_accepted)
        finally:
            # A call that has ended does not end the task that takes messages for it.
            self._outbox.put_nowait(None)

    def _receive(self, message: pb.RouterMessage, on_accepted: Callable[[], None]) -> None:
        if message.HasField("welcome"):
            welcome = welcome_from_proto(message.welcome)
            logger.info("attached to router %s", welcome.router_id)
            self.session = welcome.session
            on_accepted()
            self.send(pb.WorkerMessage(credit=self._credit()))
        elif message.HasField("goodbye"):
            self.has_router_left = True
        else:
            self._on_order(message)

    async def _messages(self) -> AsyncIterator[pb.WorkerMessage]:
        yield pb.WorkerMessage(registration=self._registration)
        while (message := await self._outbox.get()) is not None:
            yield message
            if message.HasField("goodbye"):
                return
            self.num_unread_bytes -= message.ByteSize()
