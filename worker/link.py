"""The worker's one stream to its router: it registers, then tokens and load flow on it.

A lost stream means that the router is gone, or thinks that we are: the worker aborts that router's requests and
registers again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from contract.errors import IncompatiblePeerError
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from serving.cluster_tls import ROUTER_NAME, ClusterTls
from serving.grpc_options import internal_stream_options
from wire.membership import welcome_from_proto

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 2.0
MAX_UNREAD_BYTES = 64 * 2**20
_UNPROVED = ("SSL_ERROR_SSL", "Hostname Verification")
"""What gRPC says where the listener's certificate is not a router's of this cluster, or where it speaks no TLS."""
_ID_TAKEN = grpc.StatusCode.ALREADY_EXISTS.name
"""Another process has this worker's id; it may be this worker's former life, so the worker tries again."""
_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED)


class RouterLink:
    """Owns the Attach stream to one router. ``run`` keeps it open until it is cancelled.

    session: what the router calls the stream that is open, or was open last. max_unread_bytes: of messages that wait for
    a router which does not read; with more it counts as lost. on_lost: called when a stream that was open has ended.
    """

    def __init__(
        self,
        router: str,
        tls: ClusterTls,
        registration: pb.Registration,
        credit: pb.Credit,
        on_lost: Callable[[], Awaitable[None]],
        peer_timeout_seconds: float,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
    ) -> None:
        self._peer_timeout = peer_timeout_seconds
        self._router = router
        self._tls = tls
        self._registration = registration
        self._credit = credit
        self._on_lost = on_lost
        self._outbox: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue()
        self._max_unread_bytes = max_unread_bytes
        self._call: Any = None
        self._attached = asyncio.Event()
        self.num_unread_bytes = 0
        self.session = ""
        self._router_left = self._was_attached = False
        self._ended = asyncio.Event()

    @property
    def is_attached(self) -> bool:
        """True while a router has welcomed us and the stream is open."""
        return self._attached.is_set()

    async def wait_attached(self) -> None:
        """Block until a router has welcomed us."""
        await self._attached.wait()

    def send(self, message: pb.WorkerMessage) -> None:
        """Queue a message for the router; dropped while no router is attached (its requests are aborted then)."""
        if self.is_attached:
            self._outbox.put_nowait(message)
            self.num_unread_bytes += message.ByteSize()
            if self.num_unread_bytes > self._max_unread_bytes:
                self._call.cancel()

    async def leave(self) -> None:
        """Say goodbye and wait until the stream has ended; ``run`` must be cancelled soon, or it attaches again."""
        if self.is_attached:
            self._ended.clear()
            self.send(pb.WorkerMessage(goodbye=pb.Goodbye()))
            await self._ended.wait()

    async def run(self) -> None:
        """Attach, and attach again after every loss. Raises IncompatiblePeerError when the router refuses us.

        A listener that proves nothing ends a worker that was never attached: its secret, or the router's address, is wrong.
        Later it may be a stranger who took the port while the router is away, so the worker waits.
        """
        delay = FIRST_RETRY_SECONDS
        told = ""
        while True:
            try:
                await self._attach_once()
                reason = "the router closed the stream"
            except asyncio.CancelledError:
                if self.num_unread_bytes <= self._max_unread_bytes or _is_cancelled():
                    raise
                reason = f"it leaves more than {self._max_unread_bytes} bytes unread"
            except grpc.aio.AioRpcError as error:
                if error.code() in _REFUSALS:
                    raise IncompatiblePeerError(
                        f"router {self._router} refused this worker: {error.details()}"
                    ) from error
                reason = f"{error.code().name}: {error.details()}"
                if not self._was_attached and any(sign in reason for sign in _UNPROVED):
                    raise IncompatiblePeerError(
                        f"router {self._router} does not prove that it holds this worker's cluster secret: {reason}"
                    ) from error
            if self._attached.is_set():
                delay = FIRST_RETRY_SECONDS
                self._attached.clear()
                self._log_end(reason)
                self._ended.set()
                await self._on_lost()
            else:
                is_news = _ID_TAKEN in reason and reason != told
                level = logging.WARNING if is_news else logging.INFO
                logger.log(level, "router %s is not reachable yet (%s)", self._router, reason)
            told = reason
            await asyncio.sleep(delay)
            delay = min(delay * 2, LAST_RETRY_SECONDS)

    async def _attach_once(self) -> None:
        self._outbox = asyncio.Queue()
        self.num_unread_bytes = 0
        options = internal_stream_options(self._peer_timeout)
        async with self._tls.channel(self._router, ROUTER_NAME, options) as channel:
            stub = worker_pb2_grpc.MembershipStub(channel)
            self._call = stub.Attach(self._messages())
            try:
                async for message in self._call:
                    self._hear(message)
            finally:
                # A call that has ended does not end the task that takes messages for it.
                self._outbox.put_nowait(None)

    def _hear(self, message: pb.RouterMessage) -> None:
        if message.HasField("welcome"):
            welcome = welcome_from_proto(message.welcome)
            logger.info("attached to router %s", welcome.router_id)
            self._router_left = False
            self.session = welcome.session
            self._attached.set()
            self._was_attached = True
            self.send(pb.WorkerMessage(credit=self._credit))
        elif message.HasField("goodbye"):
            self._router_left = True

    def _log_end(self, reason: str) -> None:
        if self._router_left:
            logger.info("router %s has said goodbye", self._router)
        else:
            logger.warning("lost the router %s (%s); its requests are aborted", self._router, reason)

    async def _messages(self) -> AsyncIterator[pb.WorkerMessage]:
        yield pb.WorkerMessage(registration=self._registration)
        outbox = self._outbox
        while (message := await outbox.get()) is not None:
            yield message
            if message.HasField("goodbye"):
                return
            self.num_unread_bytes -= message.ByteSize()


def _is_cancelled() -> bool:
    """Whether the running task is: a call that was cancelled raises the same error."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
