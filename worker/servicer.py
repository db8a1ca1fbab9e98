"""The Worker service, the same for all roles: what a router calls beside its orders on the Attach stream."""

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from contract.errors import InvalidRequestError, KvbatonError
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from serving.errors import grpc_code
from wire.legs import decode_from_proto, hand_off_from_proto
from wire.model_files import piece_to_proto
from worker.model_files import model_files
from worker.worker import Worker

logger = logging.getLogger(__name__)


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Serves one worker. A refusal becomes the status of the call. meet: called with the context of each call."""

    def __init__(self, worker: Worker, meet: Callable[[Any], None]) -> None:
        self._worker = worker
        self._meet = meet

    async def HandOff(self, request: pb.HandOffRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Lend the KV of a choice that is being decoded, whatever the role is now."""
        self._meet(context)
        try:
            order, seconds = hand_off_from_proto(request)
            try:
                await self._worker.hand_off(order, seconds)
            except InvalidRequestError as error:  # the call is right; the state of the choice does not fit
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        except KvbatonError as error:
            await context.abort(grpc_code(error.kind), error.message)
        return pb.Accepted()

    async def Prepare(self, request: pb.DecodeRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Prepare for a choice that is going to be handed off to this worker."""
        self._meet(context)
        try:
            await self._worker.prepare(decode_from_proto(request))
        except KvbatonError as error:
            await context.abort(grpc_code(error.kind), error.message)
        return pb.Accepted()

    async def GetModelFiles(  # noqa: N802
        self, request: pb.GetModelFilesRequest, context: Any
    ) -> AsyncIterator[pb.ModelFile]:
        """Stream the small files of the model folder."""
        self._meet(context)
        async for name, data in model_files(self._worker.model_folder):
            yield piece_to_proto(name, data)
