"""The prefill leg: compute a prompt, publish its KV chunk by chunk, sample token 0."""

from typing import Any

import grpc

from contract.errors import InvalidRequestError
from contract.requests import SendTransfer
from protos import worker_pb2 as pb
from worker.servicer import WorkerServicer
from worker.wire import request_from_task


class PrefillServicer(WorkerServicer):
    """Serves Prefill."""

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Accept a prompt whose KV will be lent under ``transfer_id``."""
        if not request.transfer_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a prefill leg needs a transfer_id")
        try:
            engine_request = request_from_task(request.task, SendTransfer(request.transfer_id))
        except InvalidRequestError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        return await self._accept(engine_request, context)
