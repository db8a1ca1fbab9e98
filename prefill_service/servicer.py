"""The prefill leg: compute a prompt, publish its KV chunk by chunk, sample the first token."""

from typing import Any

from protos import worker_pb2 as pb
from wire.legs import prefill_from_proto
from worker.servicer import WorkerServicer


class PrefillServicer(WorkerServicer):
    """Serves Prefill and Embed."""

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Accept a prompt whose KV will be offered under ``transfer_id``."""
        return await self._accept(prefill_from_proto, request, context)

    async def Embed(self, request: pb.EmbedLegRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Accept a prompt for an embedding."""
        return await self._accept_embedding(request, context)
