"""The stream of a scripted worker to its router."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from serving.cluster_tls import ROUTER_NAME, ClusterTls
from serving.grpc_options import internal_channel_options


class RouterStream:
    """Owns the connection to the router at ``address`` between ``open`` and ``close``."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._outbox: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue()
        self._channel: grpc.aio.Channel | None = None
        self._call: Any = None

    @property
    def is_open(self) -> bool:
        """True between ``open`` and ``close``."""
        return self._channel is not None

    async def open(self, tls: ClusterTls, registration: pb.Registration) -> None:
        """Attach to the router. Raises grpc.aio.AioRpcError if it rejects the registration."""
        self._channel = tls.channel(self._address, ROUTER_NAME, internal_channel_options())
        stub = worker_pb2_grpc.MembershipStub(self._channel)
        self._outbox.put_nowait(pb.WorkerMessage(registration=registration))
        self._call = stub.Attach(self._messages())
        if await self._call.read() is grpc.aio.EOF:
            raise grpc.aio.AioRpcError(
                await self._call.code(),
                await self._call.initial_metadata(),
                await self._call.trailing_metadata(),
                await self._call.details(),
            )

    async def next_order(self) -> pb.RouterMessage:
        """Return the router's next message about the worker itself."""
        message: pb.RouterMessage = await self._call.read()
        return message

    async def close(self) -> None:
        """Close the connection at once, as a crash does. Does nothing if it is closed."""
        if self._channel:
            channel = self._channel
            self._channel = None
            self._call.cancel()
            await channel.close()

    def send(self, *entries: pb.TokenEntry, load: pb.Load | None = None) -> None:
        """Send the output of a step."""
        self._outbox.put_nowait(pb.WorkerMessage(step=pb.StepOutput(entries=entries, load=load)))

    def report(self, load: pb.Load) -> None:
        """Send the load."""
        self._outbox.put_nowait(pb.WorkerMessage(load=load))

    def grant(self, credit: pb.Credit) -> None:
        """Send a new credit."""
        self._outbox.put_nowait(pb.WorkerMessage(credit=credit))

    def take_role(self, role: str, epoch: int) -> None:
        """Report another role."""
        self._outbox.put_nowait(pb.WorkerMessage(role_taken=pb.RoleTaken(role=role, epoch=epoch)))

    async def _messages(self) -> AsyncIterator[pb.WorkerMessage]:
        while message := await self._outbox.get():
            yield message
