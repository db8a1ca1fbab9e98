"""The decode leg: fetch a prompt's KV from the worker that computes it, then stream tokens."""

from typing import Any

import grpc

from contract.errors import InvalidRequestError
from contract.requests import ReceiveTransfer
from protos import worker_pb2 as pb
from worker.servicer import WorkerServicer
from worker.wire import request_from_task


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
        try:
            engine_request = request_from_task(request.task, transfer)
        except InvalidRequestError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        return await self._accept(engine_request, context)
