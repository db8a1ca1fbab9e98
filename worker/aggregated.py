"""A worker that computes prompts and decodes them itself, without a hand-over."""

from typing import Any

import grpc

from protos import worker_pb2 as pb
from wire.legs import decode_from_proto
from worker.servicer import WorkerServicer


class AggregatedServicer(WorkerServicer):
    """Accepts Decode without a source, prompt and answer on this worker, and Embed."""

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Accept a whole request."""
        if request.HasField("source"):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "a worker of role both does not fetch KV in this version"
            )
        return await self._accept(decode_from_proto, request, context)

    async def Embed(self, request: pb.EmbedLegRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Accept a prompt for an embedding."""
        return await self._accept_embedding(request, context)
