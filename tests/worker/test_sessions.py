"""A request belongs to the stream for which it was sent: its tokens can go to no other."""

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from contract.identity import Role
from protos import worker_pb2 as pb
from tests.worker.test_worker import Running, running, task, until_accepted, waiting_leg


def session_of(running_worker: Running) -> str:
    (attached,) = running_worker.router._path.registry.workers
    return attached.session


async def test_a_request_for_an_earlier_stream_is_refused(tmp_path: Path) -> None:
    """The router counted the worker as dead and it has attached again: a late call for the old stream is rejected."""
    async with running(Role.DECODE, tmp_path) as it, asyncio.timeout(20):
        await it.router.wait_for_workers(1)
        old = session_of(it)
        leg = waiting_leg()
        leg.task.session = old
        await it.call("Decode", leg)
        (attached,) = it.router._path.registry.workers
        attached.gone.set()
        await until_accepted(it, 0)
        await it.worker.wait_ready()
        assert session_of(it) != old
        leg.task.attempt = 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.call("Decode", leg)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert it.worker.num_requests == 0
        leg.task.session = session_of(it)
        await it.call("Decode", leg)
        assert it.worker.num_requests == 1


async def test_a_late_cancel_of_an_old_attempt_stops_it_though_a_newer_one_is_here(tmp_path: Path) -> None:
    async with running(Role.DECODE, tmp_path) as it:
        await it.call("Decode", waiting_leg(attempt=1))
        await it.call("Cancel", pb.CancelRequest(request_id="r", attempt=0))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.call("Decode", waiting_leg(attempt=0))
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert it.worker.num_requests == 1


async def test_cancels_that_arrive_in_the_wrong_order_are_both_remembered(tmp_path: Path) -> None:
    async with running(Role.AGGREGATED, tmp_path) as it:
        for attempt in (1, 0):
            await it.call("Cancel", pb.CancelRequest(request_id="r", attempt=attempt))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.call("Decode", pb.DecodeRequest(task=task(attempt=1)))
        assert caught.value.code() is grpc.StatusCode.CANCELLED
