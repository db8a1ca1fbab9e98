"""The decode leg: fetch a prompt's KV from the worker that computes it, then stream tokens."""

from typing import Any

import grpc

from contract.requests import ReceiveTransfer
from protos import worker_pb2 as pb
from worker.servicer import WorkerServicer


class DecodeServicer(WorkerServicer):
    """Serves Decode."""

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Accept a request whose KV is fetched from ``source``; without one the prompt is computed here as well.

        The router asks for the latter only where no prefill worker is left, or handing over keeps failing.
        """
        if not request.HasField("source"):
            return await self._accept(request.task, None, context)
        source = request.source
        if not source.transfer_id or not source.control_address:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                "the source of a decode leg needs a transfer_id and a control_address",
            )
        transfer = ReceiveTransfer(
            transfer_id=source.transfer_id,
            peer_worker_id=source.worker_id,
            peer_boot_id=source.boot_id,
            peer_control=source.control_address,
        )
        return await self._accept(request.task, transfer, context)
