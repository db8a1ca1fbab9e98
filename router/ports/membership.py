"""The internal gRPC port, and the router's side of a worker's stream.

A worker registers on its stream, and then sends tokens and its load.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from contract.errors import KvbatonError, WorkerLostError
from contract.identity import why_no_name
from contract.membership import Credit, Load, LoadedWeights, Registration, RoleOrder, Welcome
from protos import WORKER_PROTOCOL_MAX, worker_pb2_grpc
from protos import worker_pb2 as pb
from router.migration.evacuation import Evacuation
from router.settings import RouterSettings
from router.workers.attached_worker import AttachedWorker
from router.workers.order_stream import OrderStream
from router.workers.registry import Registry, WorkerIdTakenError
from router.workers.worker_calls import open_worker_calls
from serving.cluster_tls import ClusterTls, peer_names, router_tls, worker_name
from serving.grpc_options import internal_server_options, start_grpc
from serving.grpc_unauthenticated import UnauthenticatedConnections
from wire.messages import BadNumberError, from_proto, to_proto

logger = logging.getLogger(__name__)
_REGISTRATION_SECONDS = 10.0
_PEER_TIMEOUTS = 1.5
"""Time-outs of a peer after which the router has certainly noticed a dead connection."""


class MembershipServicer(worker_pb2_grpc.MembershipServicer):
    """Keeps a worker in the registry for as long as its stream is open. meet: called with the context of each call."""

    def __init__(
        self,
        registry: Registry,
        evacuation: Evacuation,
        router_id: str,
        tls: ClusterTls,
        accept_timeout_seconds: float,
        peer_timeout_seconds: float,
        meet: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self._meet = meet
        self._wait_seconds = _PEER_TIMEOUTS * peer_timeout_seconds
        self._registry = registry
        self._evacuation = evacuation
        self._router_id = router_id
        self._tls = tls
        self._accept_timeout = accept_timeout_seconds

    async def Attach(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Any
    ) -> AsyncIterator[pb.RouterMessage]:
        """Serve one worker until its stream closes, or until the same process registers again.

        A worker that does not fit is rejected with FAILED_PRECONDITION and the reason, one whose id another living process
        has with ALREADY_EXISTS. If that process is dead, because its machine or network failed and the worker was started
        again, the router notices that within the peer's time-out, and waits for it. A number out of its range ends the
        stream with INVALID_ARGUMENT and the field's name: what else the worker reports is not to be trusted either.
        """
        self._meet(context)
        try:
            registration = await _first_message(request_iterator)
        except BadNumberError as error:
            logger.warning("refused a worker: %s", error.message)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        await _check_identity(registration, context)
        async with open_worker_calls(registration, self._tls, self._accept_timeout) as calls:
            orders = OrderStream(registration.worker_id, self._accept_timeout)
            worker = self._registry.new_worker(registration, calls, orders)
            if other := self._registry.holder(registration):
                # this router may not have noticed yet that the former process is dead
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._wait_seconds):
                        await other.gone.wait()
            try:
                self._registry.attach(worker)
            except WorkerIdTakenError as error:
                logger.warning("%s", error.message)
                await context.abort(grpc.StatusCode.ALREADY_EXISTS, error.message)
            except KvbatonError as error:
                logger.warning("refused a worker: %s", error.message)
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
            reason = "its stream closed"
            try:
                await self._connect(worker, context)
                protocol = min(WORKER_PROTOCOL_MAX, registration.protocol_max)
                welcome = Welcome(protocol=protocol, router_id=self._router_id, session=worker.session)
                yield pb.RouterMessage(welcome=to_proto(pb.Welcome, welcome))
                async for message in self._orders(worker, request_iterator):
                    yield message
                if worker.is_leaving:
                    yield pb.RouterMessage(goodbye=pb.Goodbye())
            except BadNumberError as error:
                reason = error.message
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
            finally:
                self._evacuation.on_worker_gone(worker)
                self._registry.detach(worker, reason)

    async def _orders(
        self, worker: AttachedWorker, messages: AsyncIterator[pb.WorkerMessage]
    ) -> AsyncIterator[pb.RouterMessage]:
        """Read the worker's stream until the worker is gone, and yield what is sent to it meanwhile."""
        reading = asyncio.create_task(self._read(worker, messages), name=f"read the stream of {worker.name}")
        gone = asyncio.create_task(worker.gone.wait(), name=f"replacement of {worker.name}")
        for task in (reading, gone):
            # the end of either task wakes the loop below, which otherwise waits for a message to send
            task.add_done_callback(lambda _: worker.orders.close())
        try:
            async for message in worker.orders.messages():
                yield message
        finally:
            worker.orders.close()
            reading.cancel()
            gone.cancel()
            await asyncio.wait({reading, gone})
        # an error of the reader is the stream's own, and must not be lost in a task that is not awaited
        if not reading.cancelled() and (error := reading.exception()):
            raise error

    async def _read(self, worker: AttachedWorker, messages: AsyncIterator[pb.WorkerMessage]) -> None:
        async for message in messages:
            # before the message itself: a leg whose token it brings must not be rejected as late
            worker.orders.on_carried_out(message.num_orders)
            match message.WhichOneof("message"):
                case "step":
                    worker.deliver(message.step)
                case "load":
                    worker.capacity.report_load(from_proto(Load, message.load))
                case "credit":
                    worker.capacity.grant(from_proto(Credit, message.credit))
                    self._registry.weights.check(worker)
                    # decided at each credit, which names the role that the worker may take; the report below is the
                    # answer
                    worker.capacity.needs_role = self._registry.needs_role_of(worker)
                    worker.report_use()
                    self._evacuation.on_credit_changed(worker)
                case "role_taken":
                    self._evacuation.role_taken(worker, from_proto(RoleOrder, message.role_taken))
                case "weights_loaded":
                    self._registry.on_loaded(worker, from_proto(LoadedWeights, message.weights_loaded))
                case "goodbye":
                    worker.leave()
                    return
                case None:
                    pass  # it only reports the orders that were carried out
                case other:
                    logger.warning("worker %s sent %s on an open stream; ignored", worker.name, other)

    async def _connect(self, worker: AttachedWorker, context: Any) -> None:
        """Connect to a worker before it is accepted: until then it grants no credit, and receives no request."""
        try:
            await worker.calls.connect()
        except WorkerLostError as error:
            logger.warning("refused a worker: %s", error.message)
            await context.abort(grpc.StatusCode.UNAVAILABLE, error.message)


async def _check_identity(registration: Registration, context: Any) -> None:
    """End the call of a worker whose certificate is not for the ids under which it registers."""
    ids = {"worker_id": registration.worker_id, "boot_id": registration.boot_id}
    for field, value in ids.items():
        if value and (why := why_no_name(value)):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"invalid {field}: {why}")
    if worker_name(**ids) not in peer_names(context) and any(ids.values()):
        logger.warning(
            "refused a worker: it registers as %s with another's certificate", registration.worker_id
        )
        await context.abort(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"this certificate is not for worker {registration.worker_id} (boot {registration.boot_id})",
        )


async def _first_message(messages: AsyncIterator[pb.WorkerMessage]) -> Registration:
    """Return the registration, or an empty one, which is rejected, if another message or none arrives in time."""
    try:
        async with asyncio.timeout(_REGISTRATION_SECONDS):
            first = await anext(messages, pb.WorkerMessage())
    except TimeoutError:
        first = pb.WorkerMessage()
    return from_proto(Registration, first.registration)


class WorkerPort:
    """Owns the server between ``start`` and ``stop``. Raises SettingError without a usable cluster secret."""

    def __init__(self, registry: Registry, evacuation: Evacuation, settings: RouterSettings) -> None:
        self._registry = registry
        self._evacuation = evacuation
        self._settings = settings
        self._tls = router_tls(settings.read_secret())
        self._server: grpc.aio.Server | None = None

    async def start(self, max_connections: int) -> str:
        """Listen, and return the real "host:port". Raises SettingError."""
        peer_timeout = self._settings.peer_timeout_seconds
        unauthenticated = UnauthenticatedConnections()
        self._server = grpc.aio.server(options=internal_server_options(peer_timeout, max_connections))
        servicer = MembershipServicer(
            self._registry,
            self._evacuation,
            f"router-{secrets.token_hex(4)}",
            self._tls,
            self._settings.accept_timeout_seconds,
            peer_timeout,
            unauthenticated.meet,
        )
        worker_pb2_grpc.add_MembershipServicer_to_server(servicer, self._server)
        credentials = self._tls.announcing_credentials(unauthenticated.on_handshake)
        address = await start_grpc(
            self._server, self._settings.internal, param="internal", credentials=credentials
        )
        unauthenticated.watch(address)
        return address

    async def stop(self, grace_seconds: float) -> None:
        """Detach all workers and stop listening. Does nothing before ``start``."""
        if self._server:
            # with a goodbye workers do not take the end of their stream for a broken network
            for worker in self._registry.workers:
                worker.leave()
                worker.gone.set()
            await self._server.stop(grace_seconds)
