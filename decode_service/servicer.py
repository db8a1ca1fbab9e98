"""The decode leg: fetch a prompt's KV from the worker that computes it, then stream tokens."""

from typing import Any

import grpc

from contract.requests import ReceiveTransfer
from protos import worker_pb2 as pb
from worker.servicer import WorkerServicer


class DecodeServicer(WorkerServicer):
    """Serves Decode."""

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Accept a request whose KV is fetched from ``source``."""
        source = request.source
        if not request.HasField("source") or not source.transfer_id or not source.control_address:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                "a decode leg needs a source with transfer_id and control_address",
            )
        transfer = ReceiveTransfer(
            transfer_id=source.transfer_id,
            peer_worker_id=source.worker_id,
            peer_boot_id=source.boot_id,
            peer_control=source.control_address,
        )
        return await self._accept(request.task, transfer, context)
