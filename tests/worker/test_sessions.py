"""A request belongs to the stream for which it was sent: its tokens can go to no other."""

import asyncio
from pathlib import Path

from contract.identity import Role
from protos import worker_pb2 as pb
from tests.worker.test_worker import Running, running, until_accepted, waiting_leg


def session_of(running_worker: Running) -> str:
    (attached,) = running_worker.router._path.registry.workers
    return attached.session


async def test_a_new_stream_begins_without_the_requests_of_the_earlier_one(tmp_path: Path) -> None:
    """The router counted the worker as dead, and it has attached again."""
    async with running(Role.DECODE, tmp_path) as it, asyncio.timeout(20):
        await it.order(waiting_leg())
        old = session_of(it)
        (attached,) = it.router._path.registry.workers
        attached.gone.set()
        await until_accepted(it, 0)
        await it.worker.wait_ready()
        assert session_of(it) != old
        await it.order(waiting_leg(attempt=1))
        assert it.worker.num_requests == 1


async def test_a_cancel_of_an_older_attempt_leaves_the_newer_one(tmp_path: Path) -> None:
    async with running(Role.DECODE, tmp_path) as it, asyncio.timeout(20):
        await it.order(waiting_leg(attempt=1))
        await it.order(pb.CancelRequest(request_id="r", attempt=0))
        assert it.worker.num_requests == 1
        await it.order(pb.CancelRequest(request_id="r", attempt=1))
        await until_accepted(it, 0)
