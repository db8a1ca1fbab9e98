"""The worker's one stream to its router: it registers, then tokens and load flow on it.

A lost stream means that the router is gone, or thinks that we are: the worker aborts that router's requests and
registers again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio

from contract.errors import IncompatiblePeerError
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from serving.peer_auth import peer_metadata

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 2.0
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
]
_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED)


class RouterLink:
    """Owns the Attach stream to one router. ``run`` keeps it open until it is cancelled."""

    def __init__(
        self,
        router: str,
        secret: str,
        registration: pb.Registration,
        on_lost: Callable[[], Awaitable[None]],
    ) -> None:
        self._router = router
        self._secret = secret
        self._registration = registration
        self._on_lost = on_lost
        self._outbox: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()
        self._attached = asyncio.Event()

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

    async def run(self) -> None:
        """Attach, and attach again after every loss. Raises IncompatiblePeerError when the router refuses us."""
        delay = FIRST_RETRY_SECONDS
        while True:
            try:
                await self._attach_once()
                reason = "the router closed the stream"
            except grpc.aio.AioRpcError as error:
                if error.code() in _REFUSALS:
                    raise IncompatiblePeerError(
                        f"router {self._router} refused this worker: {error.details()}"
                    ) from error
                reason = f"{error.code().name}: {error.details()}"
            if self._attached.is_set():
                delay = FIRST_RETRY_SECONDS
                self._attached.clear()
                logger.warning("lost the router %s (%s); its requests are aborted", self._router, reason)
                await self._on_lost()
            else:
                logger.info("router %s is not reachable yet (%s)", self._router, reason)
            await asyncio.sleep(delay)
            delay = min(delay * 2, LAST_RETRY_SECONDS)

    async def _attach_once(self) -> None:
        self._outbox = asyncio.Queue()
        async with grpc.aio.insecure_channel(self._router, options=_KEEPALIVE) as channel:
            stub = worker_pb2_grpc.MembershipStub(channel)
            call = stub.Attach(self._messages(), metadata=peer_metadata(self._secret))
            async for message in call:
                if message.HasField("welcome"):
                    logger.info("attached to router %s", message.welcome.router_id)
                    self._attached.set()

    async def _messages(self) -> AsyncIterator[pb.WorkerMessage]:
        yield pb.WorkerMessage(registration=self._registration)
        outbox = self._outbox
        while True:
            yield await outbox.get()
