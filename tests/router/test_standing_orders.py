"""Orders of operators that outlive the process of a worker, or are logged as undone."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from contract.identity import Role
from protos import worker_pb2 as pb
from tests.fakes.router.script import Script
from tests.fakes.router.worker import ScriptedWorker
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.router.test_worker_admin import obey, workers_of
from tests.scripted_checkpoint import make_scripted_checkpoint
from tests.service import running_service
from tests.text.tiny_model import END

SAY = Script(tokens=[END])
P, D = Role.PREFILL, Role.DECODE


@asynccontextmanager
async def running() -> AsyncIterator[Cluster]:
    """Run a router with the workers prefill-0, prefill-1 and decode-0."""
    async with running_cluster(SAY, PAIR) as cluster:
        await cluster.add(P, "prefill-1")
        yield cluster


async def order(cluster: Cluster, name: str, verb: str, **query: str) -> tuple[int, Any]:
    url = f"http://{cluster.service.addresses.admin}/admin/workers/{name}/{verb}"
    async with cluster.session.post(url, params=query) as response:
        return response.status, await response.json()


async def drain(cluster: Cluster, name: str, **query: str) -> None:
    worker = cluster.workers[name]
    ordering = asyncio.create_task(order(cluster, name, "drain", wait="20", **query))
    await obey(worker, pb.Credit(is_draining=True, is_empty=True, number=2))
    assert (await ordering)[0] == 200


async def flip(cluster: Cluster, name: str, role: Role) -> None:
    """Flip a worker, which takes the role."""
    ordering = asyncio.create_task(order(cluster, name, "flip", role=role.value, wait="20"))
    await set_role(cluster.workers[name], role)
    assert (await ordering)[0] == 200


async def set_role(worker: ScriptedWorker, role: Role) -> None:
    async with asyncio.timeout(20):
        sent = await obey(worker, pb.Credit(number=2))
    assert sent.role_change.role == role.value
    worker.stream.set_role(role.value, sent.role_change.epoch)
    worker.stream.grant(pb.Credit(max_requests=64, max_tokens=2**20, number=3))


async def started_again(cluster: Cluster, name: str, role: Role) -> ScriptedWorker:
    """End a worker's process without a goodbye, and start another one with its id."""
    await cluster.workers.pop(name).die()
    await cluster.until(lambda state: name not in {worker["worker_id"] for worker in state["workers"]})
    return await cluster.add(role, name)


async def test_a_flip_outlives_the_death_of_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as cluster:
        await flip(cluster, "prefill-1", D)
        worker = await started_again(cluster, "prefill-1", P)
        await set_role(worker, D)
        await cluster.until(lambda state: [one["role"] for one in state["workers"]].count("decode") == 2)
        assert "worker prefill-1 was decode before it was lost: it takes that role again" in caplog.text
        await started_again(cluster, "decode-0", D)
        assert "decode-0 was" not in caplog.text


async def test_a_flip_that_the_service_needs_no_more_is_logged_as_undone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The other prefill worker has left, so this one is needed as it starts."""
    async with running() as cluster:
        await flip(cluster, "prefill-1", D)
        await cluster.workers.pop("prefill-1").die()
        await cluster.workers.pop("prefill-0").die()
        await cluster.until(lambda state: len(state["workers"]) == 1)
        await cluster.add(P, "prefill-1")
        await cluster.until(lambda state: all(one["max_requests"] for one in state["workers"]))
        assert "needed as prefill: the change of its role is undone" in caplog.text
        assert {one["role"] for one in (await workers_of(cluster)).values()} == {"prefill", "decode"}


@pytest.mark.parametrize("by", ["operator", "autoscaler"])
async def test_the_drain_of_an_operator_outlives_the_death_and_that_of_an_autoscaler_does_not(
    by: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An autoscaler removes the worker that it has drained, whatever its process does."""
    async with running() as cluster:
        await drain(cluster, "prefill-1", by=by)
        assert (await workers_of(cluster))["prefill-1"]["drained_by"] == by
        worker = await started_again(cluster, "prefill-1", P)
        if by == "operator":
            async with asyncio.timeout(20):
                sent = await obey(worker, pb.Credit(is_draining=True, is_empty=True, number=2))
            assert sent.HasField("drain")
            await cluster.until(lambda state: any(one["is_draining"] for one in state["workers"]))
            assert (await workers_of(cluster))["prefill-1"]["drained_by"] == "operator"
        else:
            await cluster.until(lambda state: all(one["max_requests"] for one in state["workers"]))
            assert (await workers_of(cluster))["prefill-1"]["drained_by"] is None
        assert ("it drains again" in caplog.text) is (by == "operator")


async def test_a_drain_that_was_undone_is_not_done_again(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as cluster:
        worker = cluster.workers["prefill-1"]
        await drain(cluster, "prefill-1")
        ordering = asyncio.create_task(order(cluster, "prefill-1", "undrain"))
        await obey(worker, pb.Credit(max_requests=64, max_tokens=2**20, number=3))
        assert (await ordering)[0] == 200
        await started_again(cluster, "prefill-1", P)
        await cluster.until(lambda state: all(one["max_requests"] for one in state["workers"]))
        assert "it drains again" not in caplog.text


async def test_what_the_planned_stop_of_a_worker_undoes_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as cluster:
        await flip(cluster, "prefill-1", D)
        await drain(cluster, "prefill-0")
        for name in ("prefill-0", "prefill-1"):
            cluster.workers.pop(name).stream.leave()
        await cluster.until(lambda state: len(state["workers"]) == 1)
        for name in ("prefill-0", "prefill-1"):
            await cluster.add(P, name)
        await cluster.until(lambda state: all(one["max_requests"] for one in state["workers"]))
        assert "worker prefill-1 was stopped as decode and starts as prefill" in caplog.text
        assert "worker prefill-0 was stopped while an operator drained it" in caplog.text


@pytest.mark.slow
@pytest.mark.e2e
async def test_a_real_worker_that_is_killed_takes_the_role_again_that_it_was_given(tmp_path: Path) -> None:
    model = make_scripted_checkpoint(tmp_path / "model")
    flags = ("--model", str(model), "--prefill", "2", "--decode", "1", "--num-threads", "1")
    async with running_service(tmp_path, *flags) as service, aiohttp.ClientSession() as session:
        admin = f"http://{next(one['admin'] for one in service.processes if one['role'] == 'router')}/admin/workers"

        async def worker() -> dict[str, Any]:
            async with session.get(admin) as response:
                listed = (await response.json())["workers"]
            return next((one for one in listed if one["id"] == "prefill-1"), {})

        async with session.post(
            f"{admin}/prefill-1/flip", params={"role": "decode", "wait": "60"}
        ) as response:
            assert response.status == 200
        first = await worker()
        os.kill(first["pid"], signal.SIGKILL)
        async with asyncio.timeout(120):
            while True:
                now = await worker()
                if now.get("boot_id") not in (None, first["boot_id"]) and now["role"] == "decode":
                    break
                await asyncio.sleep(0.1)
    assert (
        "prefill-1 was decode before it was lost: it takes that role again"
        in (tmp_path / "service.log").read_text()
    )
