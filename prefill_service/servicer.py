"""The prefill leg: compute a prompt, publish its KV chunk by chunk, sample token 0."""

from typing import Any

import grpc

from contract.requests import SendTransfer
from protos import worker_pb2 as pb
from worker.servicer import WorkerServicer


class PrefillServicer(WorkerServicer):
    """Serves Prefill and Embed."""

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Accept a prompt whose KV will be lent under ``transfer_id``."""
        if not request.transfer_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a prefill leg needs a transfer_id")
        return await self._accept(request.task, SendTransfer(request.transfer_id), context)

    async def Embed(self, request: pb.EmbedLegRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Accept a prompt of which only the embedding is wanted."""
        return await self._accept_embedding(request.task, context)
