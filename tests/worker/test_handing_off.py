"""A worker hands a request off: its stream gets one last entry, and its call one answer."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from contract.identity import Role
from protos import worker_pb2 as pb
from tests.worker.ordering import send_order
from tests.worker.test_draining import attached
from tests.worker.test_worker import Running, running, task, until_accepted, waiting_leg


def order(request_id: str = "r", **fields: Any) -> pb.HandOffRequest:
    given = {"next_attempt": 1, "transfer_id": "moved", "deadline_seconds": 60.0, **fields}
    return pb.HandOffRequest(request_id=request_id, **given)


async def code_of(running: Running, request: pb.HandOffRequest) -> grpc.StatusCode:
    try:
        await running.call("HandOff", request)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_what_cannot_be_handed_off_is_refused_by_its_reason(tmp_path: Path) -> None:
    async with running(Role.DECODE, tmp_path) as worker:
        assert await code_of(worker, order("unknown")) is grpc.StatusCode.NOT_FOUND
        assert await code_of(worker, order(transfer_id="")) is grpc.StatusCode.INVALID_ARGUMENT
        await worker.order(waiting_leg())
        await until_accepted(worker, 1)
        assert await code_of(worker, order()) is grpc.StatusCode.FAILED_PRECONDITION
        assert await code_of(worker, order(deadline_seconds=0.0)) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await code_of(worker, order(deadline_seconds=-1.0)) is grpc.StatusCode.INVALID_ARGUMENT
        assert await code_of(worker, order(attempt=1, next_attempt=2)) is grpc.StatusCode.NOT_FOUND
        assert worker.worker.num_requests == 1


@pytest.mark.parametrize("role", [Role.DECODE, Role.AGGREGATED])
async def test_a_request_that_decodes_leaves_a_lease_which_a_cancel_of_the_next_attempt_ends(
    tmp_path: Path, role: Role
) -> None:
    """The fake engine may have finished one before the order arrives; then the next one is handed off."""
    async with running(role, tmp_path) as worker, asyncio.timeout(60):
        number = 0
        view = await attached(worker)
        while True:
            number += 1
            send_order(view, pb.DecodeRequest(task=task(f"r{number}", max_tokens=240)))
            while not worker.worker.num_requests:
                await asyncio.sleep(0)
            while (code := await code_of(worker, order(f"r{number}"))) is grpc.StatusCode.FAILED_PRECONDITION:
                await asyncio.sleep(0)  # its prompt is not computed yet
            if code is grpc.StatusCode.OK:
                break
        await until_accepted(worker, 0)
        state = await worker.worker.debug_state()
        assert state["leases"] == [f"r{number}#0.1"]
        await worker.order(pb.CancelRequest(request_id=f"r{number}", attempt=1))
        sends = (await worker.worker.debug_state())["connector"]["sends"]
        assert sends == 1, "the fake's lease ends when its reader is gone, and there is none"
