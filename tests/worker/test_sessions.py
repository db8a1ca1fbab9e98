"""A request belongs to the stream for which it was sent: its tokens can go to no other."""

import asyncio
from pathlib import Path

import pytest

from contract.errors import CancelledError, UnavailableError
from contract.identity import Role
from protos import worker_pb2 as pb
from tests.worker.test_worker import Running, running, task, until_accepted, waiting_leg
from wire.legs import decode_from_proto


def session_of(running_worker: Running) -> str:
    (attached,) = running_worker.router._path.registry.workers
    return attached.session


async def test_a_request_for_an_earlier_stream_is_refused(tmp_path: Path) -> None:
    """The router counted the worker as dead and it has attached again: an order of the old stream is rejected."""
    async with running(Role.DECODE, tmp_path) as it, asyncio.timeout(20):
        await it.order(waiting_leg())
        old = session_of(it)
        (attached,) = it.router._path.registry.workers
        attached.gone.set()
        await until_accepted(it, 0)
        await it.worker.wait_ready()
        assert session_of(it) != old
        with pytest.raises(UnavailableError):
            await it.worker.accept(decode_from_proto(waiting_leg(attempt=1)), old)
        assert it.worker.num_requests == 0
        await it.order(waiting_leg(attempt=1))
        assert it.worker.num_requests == 1


async def test_a_late_cancel_of_an_old_attempt_stops_it_though_a_newer_one_is_here(tmp_path: Path) -> None:
    async with running(Role.DECODE, tmp_path) as it:
        await it.order(waiting_leg(attempt=1))
        await it.order(pb.CancelRequest(request_id="r", attempt=0))
        with pytest.raises(CancelledError):
            await it.order(waiting_leg(attempt=0))
        assert it.worker.num_requests == 1


async def test_cancels_that_arrive_in_the_wrong_order_are_both_remembered(tmp_path: Path) -> None:
    async with running(Role.AGGREGATED, tmp_path) as it:
        for attempt in (1, 0):
            await it.order(pb.CancelRequest(request_id="r", attempt=attempt))
        with pytest.raises(CancelledError):
            await it.order(pb.DecodeRequest(task=task(attempt=1)))
