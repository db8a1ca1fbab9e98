"""The worker's stream to one router, opened again after every loss.

A lost stream means that the router is gone, or that it regards this worker as gone: the worker aborts the requests that came
for this stream, and registers again. Streams to other routers are independent of it. ``Attachment`` is one stream, from the
registration to its end; ``RouterStream`` opens it again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from contract.errors import IncompatiblePeerError
from contract.membership import Welcome
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from serving.cluster_tls import ROUTER_NAME, ClusterTls
from serving.event_loop import is_being_cancelled
from serving.grpc_options import internal_stream_options
from wire.messages import BadNumberError, from_proto

logger = logging.getLogger(__name__)


_ACKNOWLEDGE_SECONDS = 0.01
FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 2.0
MAX_UNREAD_BYTES = 64 * 2**20
_TLS_FAILURES = ("SSL_ERROR_SSL", "Hostname Verification")
"""gRPC's texts for a listener without TLS, and for one whose certificate is not that of a router of this cluster."""
_ID_TAKEN = grpc.StatusCode.ALREADY_EXISTS.name
"""Another process has this worker's id; it may be an earlier process of this worker, so the worker tries again."""
_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED)


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

    def send(self, message: pb.WorkerMessage) -> None:
        """Queue a message for the router; cancel the call if too much is unread."""
        message.num_orders = self._num_orders
        if self._acknowledgement:  # this message has acknowledged the orders
            self._acknowledgement.cancel()
            self._acknowledgement = None
        self._outbox.put_nowait(message)
        self.num_unread_bytes += message.ByteSize()
        if self.num_unread_bytes > self._max_unread_bytes:
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
                        self.accepted = from_proto(Welcome, message.welcome)
                        on_accepted()
                    case "goodbye":
                        self.has_router_left = True
                    case _:
                        await on_message(message)
                        self._count(len(message.orders.orders))  # carried out, and not only received
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
            # The end of the messages half-closes the stream, and the router ends the call.
            if message.HasField("goodbye"):
                return
            self.num_unread_bytes -= message.ByteSize()


@dataclass(frozen=True)
class RouterAddress:
    """HOST:PORT of a router's internal port, the credentials for it, and the silence after which it counts as dead."""

    address: str
    tls: ClusterTls
    peer_timeout_seconds: float

    def channel(self) -> AbstractAsyncContextManager[grpc.aio.Channel]:
        """Return a channel that accepts only a router of this cluster."""
        return self.tls.channel(self.address, ROUTER_NAME, internal_stream_options(self.peer_timeout_seconds))


class StreamListener(Protocol):
    """Receives what happens on streams to routers."""

    def on_open(self, stream: "RouterStream") -> None:
        """Handle that a router has accepted this worker. ``stream.session`` names the stream until it is lost."""

    async def on_message(self, stream: "RouterStream", message: pb.RouterMessage) -> None:
        """Handle a message of a router on an open stream. The next one is read when this returns."""

    async def on_loss(self, session: str) -> None:
        """Handle that a stream that was open has ended. The worker registers again when this returns."""


class RouterStream:
    """Owns the Attach stream to one router. ``run`` keeps it open until it is cancelled.

    registration: sent when the stream is opened; another one counts from the next time on.
    may_attach: awaited before each attempt. max_unread_bytes: limit of the messages that wait for a router that does not
    read; above it the router counts as lost.
    """

    def __init__(
        self,
        router: RouterAddress,
        registration: pb.Registration,
        listener: StreamListener,
        *,
        may_attach: Callable[["RouterStream"], Awaitable[None]] | None = None,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
    ) -> None:
        self._router = router
        self.registration = registration
        self._listener = listener
        self._may_attach = may_attach
        self._max_unread_bytes = max_unread_bytes
        self._attachment = self._new_attachment()
        self._was_attached = False
        self._attached = asyncio.Event()
        self._detached = asyncio.Event()
        self._tried = asyncio.Event()

    @property
    def address(self) -> str:
        """HOST:PORT of the router."""
        return self._router.address

    @property
    def is_attached(self) -> bool:
        """True while the stream is open and the router has accepted this worker."""
        return self._attached.is_set()

    @property
    def session(self) -> str:
        """The router's name for the stream that was opened last; empty before that and while the next one is opened."""
        return self._attachment.accepted.session

    @property
    def router_id(self) -> str:
        """The name of the router that accepted this worker last; empty as ``session`` is."""
        return self._attachment.accepted.router_id

    @property
    def num_unread_bytes(self) -> int:
        """Size of the messages that the router has not read."""
        return self._attachment.num_unread_bytes

    async def wait_attached(self) -> None:
        """Block until a router has accepted this worker."""
        await self._attached.wait()

    async def wait_detached(self) -> None:
        """Block until the stream has ended. Call it while it is open."""
        await self._detached.wait()

    async def wait_tried(self) -> None:
        """Block until the first attempt to attach has succeeded or failed."""
        await self._tried.wait()

    def send(self, message: pb.WorkerMessage) -> None:
        """Queue a message for the router; dropped while no router is attached (its requests are aborted then)."""
        if self._attached.is_set():
            self._attachment.send(message)

    async def leave(self) -> None:
        """Send goodbye and wait until the stream has ended; cancel ``run`` soon after, or it attaches again."""
        if self.is_attached:
            self.send(pb.WorkerMessage(goodbye=pb.Goodbye()))
            await self.wait_detached()

    async def run(self) -> None:
        """Attach, and attach again after every loss. Raises IncompatiblePeerError when the router refuses this worker.

        A listener without a valid certificate ends a worker that was never attached: the secret or the router's address is
        wrong. Later it may be another program that took the port while the router is away, so the worker waits.
        """
        delay = FIRST_RETRY_SECONDS
        last_reason = ""
        while True:
            if self._may_attach:
                await self._may_attach(self)
            reason = await self._attach_once()
            self._tried.set()
            if self._attached.is_set():
                # A router of another version may send the same bad number each time: it is not tried every 0.1 s.
                if not self._attachment.has_bad_number:
                    delay = FIRST_RETRY_SECONDS
                await self._end(reason)
            else:
                # A router that is away for hours fills no log, but an id that another process has must be seen.
                level = logging.WARNING if _ID_TAKEN in reason else logging.INFO
                level = level if reason != last_reason else logging.DEBUG
                logger.log(level, "router %s is not reachable yet (%s)", self.address, reason)
            last_reason = reason
            await asyncio.sleep(delay)
            delay = min(delay * 2, LAST_RETRY_SECONDS)

    async def _end(self, reason: str) -> None:
        """Process that the open stream has ended."""
        self._attached.clear()
        self._detached.set()
        if self._attachment.has_router_left:
            logger.info("router %s is stopping", self.address)
        else:
            logger.warning("lost router %s (%s); its requests are aborted", self.address, reason)
        await self._listener.on_loss(self.session)

    async def _attach_once(self) -> str:
        """Keep one stream open to its end and return why it ended."""
        self._attachment = self._new_attachment()
        try:
            async with self._router.channel() as channel:
                await self._attachment.run(
                    channel, self._on_accepted, lambda message: self._listener.on_message(self, message)
                )
        except asyncio.CancelledError:
            # gRPC raises the same error for a call that this side has cancelled as for a task that is cancelled.
            if self.num_unread_bytes <= self._max_unread_bytes or is_being_cancelled():
                raise
            return f"it leaves more than {self._max_unread_bytes} bytes unread"
        except BadNumberError as error:
            self._attachment.has_bad_number = True
            return error.message
        except grpc.aio.AioRpcError as error:
            # Another attempt would not help.
            if error.code() in _REFUSALS:
                raise IncompatiblePeerError(
                    f"router {self.address} refused this worker: {error.details()}"
                ) from error
            reason = f"{error.code().name}: {error.details()}"
            if not self._was_attached and any(text in reason for text in _TLS_FAILURES):
                raise IncompatiblePeerError(
                    f"router {self.address} does not prove that it holds this worker's cluster secret: {reason}"
                ) from error
            self._attachment.has_bad_number = error.code() is grpc.StatusCode.INVALID_ARGUMENT
            return reason
        return "the router closed the stream"

    def _new_attachment(self) -> Attachment:
        return Attachment(self.registration, self._max_unread_bytes)

    def _on_accepted(self) -> None:
        logger.info("attached to router %s at %s", self.router_id, self.address)
        self._was_attached = True
        self._detached.clear()
        self._attached.set()
        self._tried.set()
        self._listener.on_open(self)  # last: it sends, which is dropped on a stream that is not attached
