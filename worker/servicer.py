"""The part of the Worker service that all roles share; a role adds the legs that it runs."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from contract.errors import KvbatonError
from contract.requests import EngineRequest
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from serving.errors import grpc_code
from wire.legs import cancel_from_proto, embed_from_proto
from wire.model_files import piece_to_proto
from worker.pooling import pooling_of
from worker.worker import Worker

logger = logging.getLogger(__name__)

Leg = TypeVar("Leg", pb.PrefillRequest, pb.DecodeRequest)


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Serves Cancel and GetModelFiles; refuses Prefill, Decode and Embed unless a role overrides them."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Refuse: this role does not compute prompts for other workers."""
        return await self._refuse("Prefill", context)

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Refuse: this role does not decode."""
        return await self._refuse("Decode", context)

    async def Embed(self, request: pb.EmbedLegRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Refuse: this role does not compute embeddings."""
        return await self._refuse("Embed", context)

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Stop a request, or one choice of it; unknown ids are ignored."""
        return await self._answer(self._worker.cancel(*cancel_from_proto(request)), context)

    async def GetModelFiles(  # noqa: N802
        self, request: pb.GetModelFilesRequest, context: Any
    ) -> AsyncIterator[pb.ModelFile]:
        """Stream the small files of the model folder."""
        async for name, data in self._worker.model_files():
            yield piece_to_proto(name, data)

    async def _accept(self, read: Callable[[Leg], EngineRequest], message: Leg, context: Any) -> pb.Accepted:
        """Convert a leg with ``read`` and accept it. A refusal becomes the status of the call."""

        async def accept() -> None:
            await self._worker.accept(read(message), message.task.session)

        return await self._answer(accept(), context)

    async def _accept_embedding(self, message: pb.EmbedLegRequest, context: Any) -> pb.Accepted:
        async def accept() -> None:
            pooling = await asyncio.to_thread(pooling_of, self._worker.model_folder)
            await self._worker.accept(embed_from_proto(message, pooling), message.task.session)

        return await self._answer(accept(), context)

    async def _answer(self, work: Awaitable[None], context: Any) -> pb.Accepted:
        try:
            await work
        except KvbatonError as error:
            await context.abort(grpc_code(error.kind), error.message)
        return pb.Accepted()

    async def _refuse(self, name: str, context: Any) -> pb.Accepted:
        role = self._worker.identity.role.value
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"a {role} worker does not serve {name}")
        return pb.Accepted()
