"""The controller on a real router with scripted workers; a played launcher starts and removes them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest

from autoscaler.controller import Controller
from autoscaler.decision import Decision, Reason, Verb
from autoscaler.policy import PoolBounds, ScalingPolicy
from autoscaler.timing_model import PrefillTiming
from contract.errors import UnavailableError
from contract.identity import Role
from launch.router_admin import RouterAdmin
from protos import worker_pb2 as pb
from router.testing.script import Script
from tests.autoscaler.cases import GOALS, TIMING, D, P
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.router.test_worker_admin import obey
from tests.text.tiny_model import END

SAY = Script(tokens=[END])
SLOW = msgspec.structs.replace(TIMING, prefill=PrefillTiming(base_seconds=0.8, seconds_per_token=1e-3))
POLICY = ScalingPolicy(prefill=PoolBounds(most=6), decode=PoolBounds(most=6), goals=GOALS)


class Launcher:
    """Lists names. failing: numbers of the calls of ``add`` that fail. Workers attach when a test lets them."""

    def __init__(self, *names: str) -> None:
        self.running = list(names)
        self.removed: list[str] = []
        self.failing: set[int] = set()
        self.num_adds = 0

    def names(self) -> Sequence[tuple[str, Role]]:
        return [(name, Role(name.partition("-")[0])) for name in self.running]

    def add(self, role: Role) -> str:
        self.num_adds += 1
        if self.num_adds in self.failing:
            raise UnavailableError("no machine is free")
        name = f"{role.value}-{self.num_adds}"
        self.running.append(name)
        return name

    async def remove(self, name: str) -> None:
        self.running.remove(name)
        self.removed.append(name)


class Service:
    """A router with workers, a launcher, and a clock that only ``decide`` moves."""

    def __init__(self, cluster: Cluster, session: aiohttp.ClientSession) -> None:
        self.cluster = cluster
        self.launcher = Launcher("prefill-0", "decode-0")
        self.now = 0.0
        self._session = session
        self.controller = self.new_controller()

    def new_controller(self) -> Controller:
        admin = RouterAdmin(self.cluster.service.addresses.admin, self._session)
        return Controller(POLICY, SLOW, self.launcher, lambda: [admin], clock=lambda: self.now)

    async def decide(self, seconds: float = 5.0) -> Decision:
        self.now += seconds
        return await self.controller.decide_once()

    async def ask(self, number: int) -> None:
        posts = (self.cluster.post("/v1/completions", {"prompt": "hello"}) for _ in range(number))
        assert {status for status, _ in await asyncio.gather(*posts)} == {200}


@asynccontextmanager
async def running_service(roles: tuple[Role, ...] = PAIR) -> AsyncIterator[Service]:
    async with running_cluster(SAY, roles) as cluster, aiohttp.ClientSession() as session:
        service = Service(cluster, session)
        await service.controller.begin()
        yield service


async def test_a_load_starts_workers_and_a_restart_in_between_starts_none_twice() -> None:
    async with running_service() as service:
        await service.ask(10)
        decision = await service.decide()
        (order,) = decision.orders
        assert (order.verb, order.role) == (Verb.ADD, P)
        assert service.launcher.num_adds == order.number >= 2
        service.controller = service.new_controller()
        await service.controller.begin()
        await service.ask(10)
        again = await service.decide()
        assert not again.orders
        assert again.pools[P].present == 1 + order.number


async def test_half_of_a_scale_up_that_fails_is_ordered_again(caplog: pytest.LogCaptureFixture) -> None:
    async with running_service() as service:
        service.launcher.failing = {2}
        await service.ask(10)
        decision = await service.decide()
        wanted = decision.pools[P].desired
        assert len(service.launcher.running) == 1 + wanted - 1
        assert "no machine is free" in caplog.text
        for name in service.launcher.running[2:]:
            await service.cluster.add(P, name)
        await service.ask(10)
        await service.decide()
        present = [name for name, role in service.launcher.names() if role is P]
        assert len(present) == wanted


async def test_without_metrics_it_holds_and_reports_that(caplog: pytest.LogCaptureFixture) -> None:
    async with running_service() as service:
        await service.ask(10)
        await service.cluster.service.stop()
        decision = await service.decide()
        assert not decision.orders
        assert {pool.reason for pool in decision.pools.values()} == {Reason.NO_SIGNALS}
        held = [record for record in caplog.records if "held" in record.getMessage()]
        assert [record.levelno for record in held] == [logging.WARNING]
        assert service.launcher.num_adds == 0


async def test_a_worker_that_stays_away_is_removed_and_another_one_is_started() -> None:
    async with running_service() as service:
        service.launcher.running.append("prefill-9")
        await service.decide()
        await service.ask(20)
        decision = await service.decide(3 * SLOW.start_seconds + 1.0)
        await service.controller.wait_removed()
        verbs = [order.verb for order in decision.orders if order.role is P]
        assert verbs[0] is Verb.FORGET
        assert service.launcher.removed == ["prefill-9"]


async def test_a_worker_is_removed_when_it_has_drained_and_not_before() -> None:
    async with running_service() as service:
        await service.cluster.add(P, "prefill-1")
        service.launcher.running.append("prefill-1")
        for _ in range(36):
            assert not (await service.decide()).orders
        deciding = asyncio.create_task(service.decide())
        victim = service.cluster.workers["prefill-0"]
        await obey(victim, pb.Credit(is_draining=True, drain_seconds=30))
        decision = await deciding
        assert [(order.verb, order.role) for order in decision.orders] == [(Verb.DRAIN, P)]
        await service.decide()
        assert service.launcher.removed == []
        victim.stream.grant(pb.Credit(is_draining=True, is_empty=True))
        await service.cluster.until(lambda state: any(w["is_empty"] for w in state["workers"]))
        await service.decide()
        await service.controller.wait_removed()
        assert service.launcher.removed == ["prefill-0"]


async def test_a_worker_that_an_operator_drains_is_not_removed() -> None:
    async with running_service() as service:
        await service.cluster.add(P, "prefill-1")
        service.launcher.running.append("prefill-1")
        service.cluster.workers["prefill-1"].stream.grant(pb.Credit(is_draining=True, is_empty=True))
        await service.cluster.until(lambda state: any(w["is_draining"] for w in state["workers"]))
        for _ in range(60):
            await service.decide()
        assert service.launcher.removed == []
        assert {role for _, role in service.launcher.names()} == {P, D}
