"""The stream of a scripted worker to its router."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from serving.cluster_tls import ROUTER_NAME, ClusterTls
from serving.grpc_options import internal_channel_options

_ACKNOWLEDGE_SECONDS = 0.01


class RouterStream:
    """Owns the connection to the router at ``address`` between ``open`` and ``close``.

    carry_out: takes the router's orders about requests, one after the other; after one for which it returns False, none is
    acknowledged any more.
    """

    def __init__(self, address: str, carry_out: Callable[[pb.Order], bool]) -> None:
        self._address = address
        self._carry_out = carry_out
        self._num_orders = 0
        self._is_mute = False
        self._acknowledgement: asyncio.TimerHandle | None = None
        self._about_worker: asyncio.Queue[pb.RouterMessage] = asyncio.Queue()
        self._reading: asyncio.Task[None] | None = None
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
        first = await self._call.read()
        if first is not grpc.aio.EOF:
            self._reading = asyncio.create_task(self._read(), name=f"read the stream of {self._address}")
        else:
            raise grpc.aio.AioRpcError(
                await self._call.code(),
                await self._call.initial_metadata(),
                await self._call.trailing_metadata(),
                await self._call.details(),
            )

    async def next_order(self) -> pb.RouterMessage:
        """Return the router's next message about the worker itself."""
        return await self._about_worker.get()

    async def close(self) -> None:
        """Close the connection at once, as a crash does. Does nothing if it is closed."""
        if self._channel:
            channel = self._channel
            self._channel = None
            self._call.cancel()
            if self._reading and self._reading is not asyncio.current_task():
                self._reading.cancel()
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

    def set_role(self, role: str, epoch: int) -> None:
        """Report another role."""
        self._outbox.put_nowait(pb.WorkerMessage(role_taken=pb.RoleTaken(role=role, epoch=epoch)))

    def report_weights(self, loaded: pb.WeightsLoaded) -> None:
        """Report the weights of a reload."""
        self._outbox.put_nowait(pb.WorkerMessage(weights_loaded=loaded))

    def leave(self) -> None:
        """Send the goodbye of a worker that is stopped on purpose."""
        self._outbox.put_nowait(pb.WorkerMessage(goodbye=pb.Goodbye()))

    def claim_orders(self, num_orders: int) -> None:
        """Report that so many orders were carried out, whatever was received."""
        self._num_orders = num_orders
        self._outbox.put_nowait(pb.WorkerMessage())

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                if message.HasField("orders"):
                    for order in message.orders.orders:
                        self._take(order)
                else:
                    self._about_worker.put_nowait(message)
        except grpc.aio.AioRpcError:
            pass  # the router has ended the stream

    def _take(self, order: pb.Order) -> None:
        self._is_mute |= not self._carry_out(order)
        if not self._is_mute:
            self._num_orders += 1
            if self._acknowledgement is None:
                loop = asyncio.get_running_loop()
                self._acknowledgement = loop.call_later(
                    _ACKNOWLEDGE_SECONDS, self._outbox.put_nowait, pb.WorkerMessage()
                )

    async def _messages(self) -> AsyncIterator[pb.WorkerMessage]:
        while message := await self._outbox.get():
            message.num_orders = self._num_orders
            if self._acknowledgement:  # this message is one
                self._acknowledgement.cancel()
                self._acknowledgement = None
            yield message
