"""The decode leg: fetch a prompt's KV from the worker that computes it, then stream tokens."""

from typing import Any

from protos import worker_pb2 as pb
from wire.legs import decode_from_proto
from worker.servicer import WorkerServicer


class DecodeServicer(WorkerServicer):
    """Serves Decode."""

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Accept a request whose KV is fetched from ``source``; without a source the prompt is computed here.

        The router does the latter only if no prefill worker is left, or hand-overs keep failing.
        """
        return await self._accept(decode_from_proto, request, context)
