"""The router's calls to one worker, beside the orders on the worker's stream (``router/workers/order_stream.py``)."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from typing import Any

import grpc
import grpc.aio

from contract.errors import (
    DeadlineError,
    IncompatiblePeerError,
    InternalError,
    InvalidRequestError,
    KvbatonError,
    NotFoundError,
    OverloadedError,
    WorkerLostError,
)
from contract.membership import Registration, ReloadOrder, ReloadReport
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from serving.cluster_tls import ClusterTls, worker_name
from serving.event_loop import is_being_cancelled
from serving.grpc_options import internal_channel_options
from wire.messages import from_proto, to_proto

_ERRORS: dict[grpc.StatusCode, type[KvbatonError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.FAILED_PRECONDITION: IncompatiblePeerError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: WorkerLostError,
    grpc.StatusCode.CANCELLED: WorkerLostError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
}


class WorkerCalls:
    """A channel to one worker. Every method raises a KvbatonError that names the worker and the call."""

    def __init__(self, worker_id: str, channel: grpc.aio.Channel, timeout_seconds: float) -> None:
        self._worker_id = worker_id
        self._channel = channel
        self._stub = worker_pb2_grpc.WorkerStub(channel)
        self._timeout = timeout_seconds

    async def connect(self) -> None:
        """Connect now, so that no call needs a descriptor and time for it. Raises WorkerLostError."""
        try:
            async with asyncio.timeout(self._timeout):
                await self._channel.channel_ready()
        except (TimeoutError, grpc.aio.UsageError):
            raise WorkerLostError(
                f"the router cannot connect to worker {self._worker_id} at the address that it registered; "
                "is its host or advertise_host right?"
            ) from None

    async def hand_off(self, request: pb.HandOffRequest) -> None:
        """Order a choice to be handed off. NotFoundError: the worker does not have it (any more)."""
        with self.own_errors("HandOff"):
            await self._stub.HandOff(request, timeout=self._timeout)

    async def prepare(self, leg: pb.DecodeRequest) -> None:
        """Let it prepare for a choice that is going to be handed off to it, and wait until that is over."""
        with self.own_errors("Prepare"):
            await self._stub.Prepare(leg, timeout=self._timeout)

    async def reset_prefix_cache(self) -> None:
        """Let it drop its prefix cache. IncompatiblePeerError: blocks are held, and nothing was dropped."""
        with self.own_errors("ResetPrefixCache"):
            await self._stub.ResetPrefixCache(pb.ResetPrefixCacheRequest(), timeout=self._timeout)

    @asynccontextmanager
    async def reloading(self) -> AsyncIterator["ReloadCall"]:
        """Have it offer no credit, to any router, until the block ends; see ``ReloadCall``."""
        call = self._stub.ReloadWeights()
        try:
            yield ReloadCall(self._worker_id, call, self.own_errors)
        finally:
            call.cancel()  # does nothing after ``serve``

    async def model_files(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield the small files of its model folder in pieces: a file's name, and bytes to append to it."""
        with self.own_errors("GetModelFiles"):
            async for piece in self._stub.GetModelFiles(pb.GetModelFilesRequest(), timeout=self._timeout):
                yield piece.name, piece.data

    @contextmanager
    def own_errors(self, call: str) -> Iterator[None]:
        """Raise the library's errors as a KvbatonError. A channel that is closed meanwhile cancels its calls."""
        try:
            yield
        except asyncio.CancelledError as error:
            # the library raises the same error for a closed channel: only a cancellation of this task is passed on
            if is_being_cancelled():
                raise
            raise WorkerLostError(f"worker {self._worker_id} had gone before it answered {call}") from error
        except grpc.aio.UsageError as error:
            raise WorkerLostError(f"worker {self._worker_id} had gone before {call} was sent") from error
        except grpc.aio.AioRpcError as error:
            error_class = _ERRORS.get(error.code(), InternalError)
            raise error_class(
                f"worker {self._worker_id} did not accept {call}: {error.code().name}: {error.details()}"
            ) from error


class ReloadCall:
    """The steps of a reload of one worker's weights, in order; a worker serves on as before if no ``load`` was ordered.

    Every method raises a KvbatonError that names the worker. own_errors: of its ``WorkerCalls``.
    """

    def __init__(
        self, worker_id: str, call: Any, own_errors: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self.worker_id = worker_id
        self._call = call
        self._own_errors = own_errors

    async def close(self) -> None:
        """Wait until no router has a leg bound to it and it lends no KV. IncompatiblePeerError: it cannot be reloaded."""
        await self._next_report()

    async def load(self, epoch: int) -> str:
        """Let it read its weights; return their fingerprint. epoch: the number of the reload.

        Raises IncompatiblePeerError if it keeps those that it has, WorkerLostError if it has none any more.
        """
        await self._send(ReloadOrder(step="load", epoch=epoch))
        report = await self._next_report()
        if report.is_lost:
            raise WorkerLostError(f"worker {self.worker_id} ends: {report.error}")
        if report.error:
            raise IncompatiblePeerError(f"worker {self.worker_id} keeps its former weights: {report.error}")
        return report.model_fingerprint

    async def serve(self, epoch: int) -> None:
        """Let it serve again. epoch: of its weights from now on; 0: others are served."""
        await self._send(ReloadOrder(step="serve", epoch=epoch))
        with self._own_errors("ReloadWeights"):
            await self._call.done_writing()
            await self._call.read()

    async def _send(self, order: ReloadOrder) -> None:
        # A call that has ended takes no order; the next report is its error.
        with self._own_errors("ReloadWeights"), suppress(asyncio.InvalidStateError):
            await self._call.write(to_proto(pb.ReloadOrder, order))

    async def _next_report(self) -> ReloadReport:
        with self._own_errors("ReloadWeights"):
            message = await self._call.read()
        if message is grpc.aio.EOF:
            raise WorkerLostError(f"worker {self.worker_id} has ended the reload of its weights")
        return from_proto(ReloadReport, message)


@asynccontextmanager
async def open_worker_calls(
    registration: Registration, tls: ClusterTls, timeout_seconds: float
) -> AsyncIterator[WorkerCalls]:
    """Open a channel to the worker's address until the block ends. Only the worker's own certificate is accepted."""
    name = worker_name(registration.worker_id, registration.boot_id)
    async with tls.channel(registration.address, name, internal_channel_options()) as channel:
        yield WorkerCalls(registration.worker_id, channel, timeout_seconds)
