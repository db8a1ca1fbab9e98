"""The scripted worker: a gRPC server, a stream to the router, and a player of scripts."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
import grpc.aio

from contract.errors import KvbatonError
from contract.identity import Role, new_boot_id
from protos import WORKER_PROTOCOL_MAX, worker_pb2_grpc
from protos import worker_pb2 as pb
from serving.cluster_tls import worker_tls
from serving.errors import grpc_code
from serving.grpc_options import internal_server_options
from tests.fakes.router.entries import rejection_entry
from tests.fakes.router.player import ScriptPlayer
from tests.fakes.router.script import Writer
from tests.fakes.router.stream import RouterStream

_WAIT_SECONDS = 30.0


@dataclass
class ReceivedCalls:
    """The legs, cancels and calls that a worker has received, in order."""

    prefills: list[pb.PrefillRequest] = field(default_factory=list)
    decodes: list[pb.DecodeRequest] = field(default_factory=list)
    embeds: list[pb.EmbedLegRequest] = field(default_factory=list)
    preparations: list[pb.DecodeRequest] = field(default_factory=list)
    resets: list[pb.ResetPrefixCacheRequest] = field(default_factory=list)
    num_reloads: int = 0
    reload_orders: list[pb.ReloadOrder] = field(default_factory=list)
    hand_offs: list[pb.HandOffRequest] = field(default_factory=list)
    cancels: list[pb.CancelRequest] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_for(self, is_true: Callable[["ReceivedCalls"], bool]) -> None:
        """Block until ``is_true``; it is called again after every order and call that the worker receives.

        Raises TimeoutError after half a minute.
        """
        async with asyncio.timeout(_WAIT_SECONDS):
            while not is_true(self):
                self._changed.clear()
                await self._changed.wait()

    def notify(self) -> None:
        """Let waiters check again."""
        self._changed.set()


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """A worker of any role.

    script: returns the script for each choice of each task. registration: overrides fields of the registration.
    """

    def __init__(
        self,
        role: Role,
        router: str,
        secret: str,
        script: Writer,
        *,
        worker_id: str | None = None,
        model_files: Mapping[str, bytes] | None = None,
        registration: Mapping[str, Any] | None = None,
        credit: pb.Credit | None = None,
    ) -> None:
        self.worker_id = worker_id or f"{role.value}-0"
        self.received = ReceivedCalls()
        self.stream = RouterStream(router, self._carry_out)
        self.player = ScriptPlayer(self.worker_id, script, self.stream)
        self.holds_blocks = False
        self.reload_refusal: str | None = None
        self.weights: str | None = "model-b@float32"
        """The fingerprint of the weights that a reload reads; None: it fails, and the worker keeps its own."""
        self.is_empty = asyncio.Event()
        """Clear it to hold up a reload."""
        self.is_empty.set()
        self.may_give_files = asyncio.Event()
        """Clear it to delay the model's files."""
        self.may_give_files.set()
        self._secret = secret
        self._registration = _default_registration(self.worker_id, role) | dict(registration or {})
        self._model_files = dict(model_files or {})
        self._credit = credit or pb.Credit(max_requests=256, max_tokens=2**20)
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:  # also if it is cancelled: a server must not outlive its event loop
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, and attach to the router. Raises grpc.aio.AioRpcError if it rejects the registration."""
        fields = {"boot_id": new_boot_id(), **self._registration}
        tls = worker_tls(self._secret, fields["worker_id"], fields["boot_id"])
        self._server = grpc.aio.server(options=internal_server_options(3.0))
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        address = f"127.0.0.1:{self._server.add_secure_port('127.0.0.1:0', tls.server_credentials)}"
        await self._server.start()
        addresses = {"address": address, "control_address": address}
        await self.stream.open(tls, pb.Registration(**(addresses | fields)))
        self.stream.grant(self._credit)

    async def stop(self) -> None:
        """Detach and stop listening. Does nothing the second time."""
        await self.die()
        await self.player.close()
        await self.close_port()

    async def close_port(self) -> None:
        """Stop listening, so that every call fails; the stream stays. Does nothing the second time."""
        if self._server:
            server = self._server
            self._server = None
            await server.stop(None)

    @property
    def is_dead(self) -> bool:
        """True once it has died or was stopped."""
        return not self.stream.is_open

    async def die(self) -> None:
        """Close the stream to the router at once, as a crash does."""
        await self.stream.close()

    async def HandOff(self, request: pb.HandOffRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """End a leg behind the tokens that it has emitted."""
        self.received.hand_offs.append(request)
        self.received.notify()
        try:
            await self.player.hand_off(request)
        except KvbatonError as error:
            await context.abort(grpc_code(error.kind), error.message)
        return pb.Accepted()

    async def Prepare(self, request: pb.DecodeRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Record the choice, and prepare nothing."""
        self.received.preparations.append(request)
        self.received.notify()
        try:
            await self.player.prepare(request.task)
        except KvbatonError as error:
            await context.abort(grpc_code(error.kind), error.message)
        return pb.Accepted()

    async def ResetPrefixCache(  # noqa: N802
        self, request: pb.ResetPrefixCacheRequest, context: Any
    ) -> pb.Accepted:
        """Record the order; refuse it while ``holds_blocks``."""
        self.received.resets.append(request)
        self.received.notify()
        if self.holds_blocks:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "blocks are held")
        return pb.Accepted()

    async def ReloadWeights(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ReloadOrder], context: Any
    ) -> AsyncIterator[pb.ReloadReport]:
        """Record the orders, and offer no credit before the end of the call."""
        self.received.num_reloads += 1
        self.received.notify()
        if self.reload_refusal:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.reload_refusal)
        self.stream.grant(pb.Credit(number=1))
        loaded = pb.WeightsLoaded()
        try:
            await self.is_empty.wait()
            yield pb.ReloadReport()
            async for order in request_iterator:
                self.received.reload_orders.append(order)
                self.received.notify()
                loaded.epoch = order.epoch
                if order.step == "load":
                    loaded.model_fingerprint = self.weights or ""
                    error = "" if self.weights else "a shard is missing"
                    yield pb.ReloadReport(model_fingerprint=self.weights or "", error=error)
        finally:
            if loaded.model_fingerprint:
                self.stream.report_weights(loaded)
            self.stream.grant(self._credit)

    async def GetModelFiles(  # noqa: N802
        self, request: pb.GetModelFilesRequest, context: Any
    ) -> AsyncIterator[pb.ModelFile]:
        """Send the model's files, in two pieces each."""
        await self.may_give_files.wait()
        for name, data in self._model_files.items():
            half = len(data) // 2
            yield pb.ModelFile(name=name, data=data[:half])
            yield pb.ModelFile(name=name, data=data[half:])

    def _carry_out(self, order: pb.Order) -> bool:
        """Play a leg, or stop a choice's attempts; return False for one whose script is mute."""
        is_answered = True
        match order.WhichOneof("order"):
            case "prefill":
                self.received.prefills.append(order.prefill)
                is_answered = self._begin(order.prefill.task, end=order.prefill.task.first_index + 1)
            case "decode":
                self.received.decodes.append(order.decode)
                is_answered = self._begin(order.decode.task)
            case "embed":
                self.received.embeds.append(order.embed)
                is_answered = self._begin(order.embed.task, is_embedding=True)
            case "cancel":
                self.received.cancels.append(order.cancel)
                self.player.cancel(order.cancel)
        self.received.notify()
        return is_answered

    def _begin(self, task: pb.Task, *, end: int | None = None, is_embedding: bool = False) -> bool:
        """Begin every choice of a task; return False if its script is mute. end: see ``ScriptPlayer.begin``."""
        for choice in range(task.choice, task.choice + max(1, task.num_choices)):
            own = pb.Task()
            own.CopyFrom(task)
            own.choice = choice
            script = self.player.begin(own, end, is_embedding=is_embedding)
            if script.refuse:
                self.stream.send(rejection_entry(own, script.refuse))
        return not script.is_mute


def _default_registration(worker_id: str, role: Role) -> dict[str, Any]:
    return {
        "protocol_min": WORKER_PROTOCOL_MAX,
        "protocol_max": WORKER_PROTOCOL_MAX,
        "worker_id": worker_id,
        "role": role.value,
        "model_name": "scripted",
        "model_fingerprint": "model-a@float32",
        "kv_layout": kv_layout(),
        "max_model_len": 4096,
        "num_blocks": 256,
        "vocab_size": 1000,
    }


def kv_layout(block_size: int = 16, dtype: str = "float32") -> pb.KvLayout:
    """Return the layout of a scripted worker's blocks."""
    return pb.KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=block_size, dtype=dtype)
