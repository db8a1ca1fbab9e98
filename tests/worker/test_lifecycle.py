"""The states of a worker, the calls that its role serves, and the connector that every worker has."""

import asyncio
import itertools
from pathlib import Path

import pytest

from contract.errors import UnavailableError
from contract.identity import Role
from engine.client import InProcessClient
from engine.connecting import Transfers
from kv_transfer.connector import TransferFactory
from roles.table import ROLES, STAGES
from router.service import RouterService
from router.settings import RouterSettings
from tests.engine_scheduling.stepping import fake_settings
from tests.fakes.engine.fakes import start_fake_executor
from tests.worker.test_worker import FREE, SECRET, running, worker_settings
from worker.lifecycle import Lifecycle, WorkerState
from worker.registration import WorkerIdentity
from worker.role_rules import LegCall
from worker.service import open_ports
from worker.worker import Worker


def test_a_worker_that_has_left_serves_nothing_more() -> None:
    """STARTING → SERVING → LEFT; a router that accepts it too late changes nothing."""
    lifecycle = Lifecycle(Role.DECODE, ROLES)
    lifecycle.check_open()
    states = [lifecycle.state]
    for change in (lifecycle.on_attach, lifecycle.on_attach, lifecycle.leave, lifecycle.on_attach):
        change()
        states.append(lifecycle.state)
    assert states == [
        WorkerState.STARTING,
        WorkerState.SERVING,
        WorkerState.SERVING,
        WorkerState.LEFT,
        WorkerState.LEFT,
    ]
    with pytest.raises(UnavailableError, match="stopping"):
        lifecycle.check_open()


def test_each_role_serves_its_calls() -> None:
    """A prefill worker never decodes, a decode worker never embeds, and the current role decides."""
    served = {
        (Role.PREFILL, LegCall.PREFILL),
        (Role.PREFILL, LegCall.EMBED),
        (Role.DECODE, LegCall.DECODE),
        (Role.AGGREGATED, LegCall.DECODE),
        (Role.AGGREGATED, LegCall.EMBED),
    }
    lifecycle = Lifecycle(Role.PREFILL, ROLES)
    for role, call in itertools.product((Role.PREFILL, Role.DECODE, Role.AGGREGATED), LegCall):
        lifecycle.role = role
        assert (lifecycle.reader_of(call) is not None) is ((role, call) in served)


async def test_a_leaving_worker_is_no_longer_open(tmp_path: Path) -> None:
    """A call that arrives after the goodbye is refused with the reason, and the state is visible to operators."""
    async with running(Role.DECODE, tmp_path) as it:
        assert (await it.worker.debug_state())["state"] == "serving"
        await it.worker.leave()
        assert (await it.worker.debug_state())["state"] == "left"
        with pytest.raises(UnavailableError, match="stopping"):
            it.worker.lifecycle.check_open()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.AGGREGATED])
async def test_a_worker_of_every_role_registers_a_control_address(tmp_path: Path, role: Role) -> None:
    """HOUSE §1.6: its pool can flip, so its connector does not depend on the role in which it starts."""
    router = RouterService(RouterSettings(**FREE, secret=SECRET))
    await router.start()
    settings = worker_settings(tmp_path, router.addresses.internal)
    factory = TransferFactory(settings.transfer(role, "w", "boot"))
    engine = await InProcessClient.start(
        fake_settings(), Transfers(factory, STAGES), start=start_fake_executor
    )
    try:
        worker = Worker(WorkerIdentity(role, "w", "boot"), ROLES, settings, engine)
        async with open_ports(worker, settings) as addresses:
            run = asyncio.create_task(worker.run(addresses["grpc"], addresses["admin"]))
            async with asyncio.timeout(20):
                await worker.wait_ready()
                await router.wait_for_workers(1)
            (attached,) = router._path.registry.workers
            assert attached.registration.control_address == engine.info.control_address != ""
            run.cancel()
            await asyncio.wait([run])
    finally:
        await engine.shutdown()
        await router.stop()
