"""The Worker service, the same for all roles: the worker's current role decides which legs it accepts."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc
import grpc.aio

from contract.errors import InvalidRequestError, KvbatonError
from contract.requests import EngineRequest
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from serving.errors import grpc_code
from wire.legs import (
    cancel_from_proto,
    decode_from_proto,
    embed_from_proto,
    hand_off_from_proto,
    prefill_from_proto,
)
from wire.model_files import piece_to_proto
from worker.lifecycle import LegCall
from worker.model_files import model_files
from worker.pooling import pooling_of
from worker.worker import Worker

logger = logging.getLogger(__name__)


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Accepts the legs that the worker's role serves. A refusal becomes the status of the call."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Accept a prompt whose KV will be offered under ``transfer_id``."""
        await self._check_served(LegCall.PREFILL, context)

        async def accept() -> None:
            await self._accept(prefill_from_proto(request), request.task)

        return await self._answer(accept(), context)

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Accept a request whose KV is fetched from ``source``; without a source the prompt is computed here."""
        await self._check_served(LegCall.DECODE, context)

        async def accept() -> None:
            await self._accept(decode_from_proto(request), request.task)

        return await self._answer(accept(), context)

    async def Embed(self, request: pb.EmbedLegRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Accept a prompt for an embedding."""
        await self._check_served(LegCall.EMBED, context)

        async def accept() -> None:
            pooling = await asyncio.to_thread(pooling_of, self._worker.model_folder)
            await self._accept(embed_from_proto(request, pooling), request.task)

        return await self._answer(accept(), context)

    async def HandOff(self, request: pb.HandOffRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Lend the KV of a choice that is being decoded, whatever the role is now."""

        async def hand_off() -> None:
            order, seconds = hand_off_from_proto(request)
            try:
                await self._worker.hand_off(order, seconds)
            except (
                InvalidRequestError
            ) as error:  # the call is right, and the state of the choice does not fit
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)

        return await self._answer(hand_off(), context)

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Stop a request, or one choice of it; unknown ids are ignored."""
        return await self._answer(self._worker.cancel(*cancel_from_proto(request)), context)

    async def GetModelFiles(  # noqa: N802
        self, request: pb.GetModelFilesRequest, context: Any
    ) -> AsyncIterator[pb.ModelFile]:
        """Stream the small files of the model folder."""
        async for name, data in model_files(self._worker.model_folder):
            yield piece_to_proto(name, data)

    async def _accept(self, request: EngineRequest, task: pb.Task) -> None:
        await self._worker.accept(request, task.session)

    async def _answer(self, work: Awaitable[None], context: Any) -> pb.Accepted:
        try:
            await work
        except KvbatonError as error:
            await context.abort(grpc_code(error.kind), error.message)
        return pb.Accepted()

    async def _check_served(self, call: LegCall, context: Any) -> None:
        """Abort a call that the worker's role does not serve."""
        lifecycle = self._worker.lifecycle
        if not lifecycle.serves(call):
            await context.abort(
                grpc.StatusCode.UNIMPLEMENTED, f"a {lifecycle.role.value} worker does not serve {call.value}"
            )
