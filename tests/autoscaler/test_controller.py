"""The controller on a real router with scripted workers; a played launcher starts and removes them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import msgspec
import pytest

from autoscaler.controller import Controller
from autoscaler.decision import Decision, Verb
from autoscaler.policy import Damping, PoolBounds, ScalingPolicy
from autoscaler.timing_model import PrefillTiming
from contract.errors import UnavailableError
from contract.identity import Role
from contract.scaling import AUTOSCALER, ScalingReason
from launch.router_admin import RouterAdmin
from protos import worker_pb2 as pb
from tests.autoscaler.cases import GOALS, TIMING, D, P
from tests.fakes.router.script import Script
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.router.test_worker_admin import obey
from tests.text.tiny_model import END

SAY = Script(tokens=[END])
SLOW = msgspec.structs.replace(TIMING, prefill=PrefillTiming(base_seconds=0.8, seconds_per_token=1e-3))
POLICY = ScalingPolicy(
    prefill=PoolBounds(most=6),
    decode=PoolBounds(most=6),
    goals=GOALS,
    damping=Damping(first_start=0.0),  # else the first start would be waited for longer than requests count
)


class Launcher:
    """Lists names. failing: numbers of the calls of ``add`` that fail. most: workers of a role.

    Workers attach when a test lets them.

    is_away: nothing answers.
    """

    def __init__(self, *names: str) -> None:
        self.running = list(names)
        self.removed: list[str] = []
        self.failing: set[int] = set()
        self.num_adds = 0
        self.most = 100
        self.is_away = False

    async def names(self) -> Sequence[tuple[str, Role]]:
        if self.is_away:
            raise UnavailableError("the engine is away")
        return [(name, Role(name.partition("-")[0])) for name in self.running]

    async def add(self, role: Role) -> str:
        self.num_adds += 1
        names = [name for name in self.running if name.startswith(role.value)]
        if self.num_adds in self.failing or len(names) >= self.most:
            raise UnavailableError("no machine is free")
        name = f"{role.value}-{self.num_adds}"
        self.running.append(name)
        return name

    async def remove(self, name: str) -> None:
        if self.is_away:
            raise UnavailableError("the engine is away")
        self.running.remove(name)
        self.removed.append(name)


class Service:
    """A router with workers, a launcher, and a clock that only ``decide`` moves."""

    def __init__(self, cluster: Cluster, session: aiohttp.ClientSession, policy: ScalingPolicy) -> None:
        self.policy = policy
        self.cluster = cluster
        self.launcher = Launcher("prefill-0", "decode-0")
        self.now = 0.0
        self.session = session
        self.admins = [RouterAdmin(cluster.service.addresses.admin, session)]
        self.controller = self.new_controller()

    def new_controller(self) -> Controller:
        async def routers() -> list[RouterAdmin]:
            return self.admins

        return Controller(self.policy, SLOW, self.launcher, routers, clock=lambda: self.now)

    async def decide(self, seconds: float = 5.0) -> Decision:
        self.now += seconds
        return await self.controller.decide_once()

    async def add_drained(self, name: str, by: str = AUTOSCALER) -> None:
        """Add a prefill worker that has drained."""
        worker = await self.cluster.add(P, name)
        self.launcher.running.append(name)
        ordering = asyncio.create_task(self.admins[0].order(name, "drain", by=by))
        await obey(worker, pb.Credit(is_draining=True, is_empty=True))
        await ordering

    async def ask(self, number: int) -> None:
        posts = (self.cluster.post("/v1/completions", {"prompt": "hello"}) for _ in range(number))
        assert {status for status, _ in await asyncio.gather(*posts)} == {200}


@asynccontextmanager
async def running_service(
    roles: tuple[Role, ...] = PAIR, policy: ScalingPolicy = POLICY
) -> AsyncIterator[Service]:
    async with running_cluster(SAY, roles) as cluster, aiohttp.ClientSession() as session:
        service = Service(cluster, session, policy)
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


async def test_routers_publish_the_decision() -> None:
    async with running_service() as service:
        await service.ask(10)
        decision = await service.decide()
        metrics = await service.cluster.metrics()
        for role in (P, D):
            published = metrics[f'kvbaton_desired_workers{{pool="{role.value}"}}']
            assert published == decision.pools[role].desired
        assert decision.pools[P].desired > metrics['kvbaton_workers{pool="prefill",state="serving"}']
        counted = [name for name in metrics if "scaling_decisions" in name and 'direction="up"' in name]
        assert counted == [
            f'kvbaton_scaling_decisions_total{{direction="up",pool="prefill",reason="{decision.pools[P].reason}"}}'
        ]


async def test_a_router_that_is_away_does_not_keep_the_others_from_the_decision() -> None:
    async with running_service() as service:
        away = RouterAdmin("127.0.0.1:1", service.session)
        service.admins.insert(0, away)
        await service.ask(10)
        decision = await service.decide()
        metrics = await service.cluster.metrics()
        assert metrics['kvbaton_desired_workers{pool="prefill"}'] == decision.pools[P].desired > 1


async def test_while_the_launcher_is_away_the_routers_publish_that_nothing_is_decided() -> None:
    async with running_service() as service:
        service.launcher.is_away = True
        await service.decide()
        metrics = await service.cluster.metrics()
        assert metrics['kvbaton_desired_workers{pool="prefill"}'] == 1
        labels = 'direction="none",pool="prefill",reason="no_signals"'
        assert metrics[f"kvbaton_scaling_decisions_total{{{labels}}}"] == 1


async def test_half_of_a_scale_up_that_fails_is_ordered_again(caplog: pytest.LogCaptureFixture) -> None:
    async with running_service() as service:
        service.launcher.failing = {2}
        await service.ask(40)
        decision = await service.decide()
        wanted = decision.pools[P].desired
        assert len(service.launcher.running) == 1 + wanted - 1
        assert "no machine is free" in caplog.text
        for name in service.launcher.running[2:]:
            await service.cluster.add(P, name)
        await service.ask(40)
        await service.decide()
        present = [name for name, role in await service.launcher.names() if role is P]
        assert len(present) == wanted


async def test_without_metrics_it_holds_and_reports_that(caplog: pytest.LogCaptureFixture) -> None:
    async with running_service() as service:
        await service.ask(10)
        await service.cluster.service.stop()
        decision = await service.decide()
        assert not decision.orders
        assert {pool.reason for pool in decision.pools.values()} == {ScalingReason.NO_SIGNALS}
        held = [record for record in caplog.records if "held" in record.getMessage()]
        assert [record.levelno for record in held] == [logging.WARNING]
        assert service.launcher.num_adds == 0


async def test_without_the_list_of_workers_it_holds_and_orders_nothing_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It would not see the workers that it has started, and start as many again."""
    async with running_service() as service:
        await service.ask(10)
        first = await service.decide()
        service.launcher.is_away = True
        await service.ask(10)
        held = await service.decide()
        assert first.orders
        assert not held.orders
        assert "the engine is away" in caplog.text
        service.launcher.is_away = False
        await service.ask(10)
        again = await service.decide()
        assert not again.orders
        assert again.pools[P].present == first.pools[P].desired


async def test_it_begins_when_routers_and_launcher_answer() -> None:
    async with running_service() as service:
        service.launcher.is_away = True
        assert not await service.new_controller().begin()
        service.launcher.is_away = False
        assert await service.new_controller().begin()
        await service.cluster.service.stop()
        assert not await service.new_controller().begin()


async def test_two_workers_that_stay_away_are_both_removed() -> None:
    async with running_service() as service:
        service.launcher.running += ["prefill-8", "prefill-9"]
        await service.decide()
        await service.decide(3 * SLOW.start_seconds + 1.0)
        await service.controller.wait_removed()
        assert sorted(service.launcher.removed) == ["prefill-8", "prefill-9"]


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


async def test_the_place_of_a_worker_that_is_given_up_is_taken_at_once() -> None:
    """The new worker may have its name: it is no older than its own order."""
    async with running_service(policy=replace(POLICY, prefill=PoolBounds(most=2))) as service:
        service.launcher.running.append("prefill-1")
        service.launcher.most = 2
        await service.decide()
        await service.ask(120)
        await service.decide(3 * SLOW.start_seconds + 1.0)
        assert service.launcher.num_adds == 1
        assert service.launcher.removed == ["prefill-1"]
        assert service.launcher.running == ["prefill-0", "decode-0", "prefill-1"]
        await service.ask(20)
        assert not (await service.decide()).orders


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


async def test_a_worker_takes_the_role_of_the_pool_that_needs_it_and_no_device_is_added() -> None:
    async with running_service(policy=replace(POLICY, budget=3)) as service:
        cluster = service.cluster
        await cluster.add(D, "decode-1")
        service.launcher.running.append("decode-1")
        for _ in range(2):
            await service.ask(10)
            decision = await service.decide()
        assert [(order.verb, order.role) for order in decision.orders] == [(Verb.FLIP, D)]
        assert service.launcher.num_adds == 0
        worker = cluster.workers["decode-0"]
        order = await obey(worker, pb.Credit(number=2))
        assert order.role_change.role == "prefill"
        await service.ask(10)
        between = await service.decide()
        assert not between.orders
        worker.stream.set_role("prefill", order.role_change.epoch)
        worker.stream.grant(pb.Credit(max_requests=256, max_tokens=2**20, number=3))
        await cluster.until(lambda state: [each["role"] for each in state["workers"]].count("prefill") == 2)
        await cluster.until(lambda state: all(each["max_requests"] for each in state["workers"]))
        after = await service.decide()
        assert {role: after.pools[role].present for role in (P, D)} == {P: 2, D: 1}
        metrics = await cluster.metrics()
        for labels in ('direction="up",pool="prefill"', 'direction="down",pool="decode"'):
            assert metrics[f'kvbaton_scaling_decisions_total{{{labels},reason="flip"}}'] == 1


async def test_a_restarted_controller_removes_what_the_one_before_drained() -> None:
    async with running_service() as service:
        await service.add_drained("prefill-1")
        service.controller = service.new_controller()
        await service.controller.begin()
        await service.decide()
        await service.controller.wait_removed()
        assert service.launcher.removed == ["prefill-1"]


async def test_a_restarted_controller_leaves_what_an_operator_drained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_service() as service:
        await service.add_drained("prefill-1", by="")
        service.controller = service.new_controller()
        await service.controller.begin()
        for _ in range(3):
            await service.decide()
        await service.controller.wait_removed()
        assert service.launcher.removed == []
        assert "worker prefill-1 drains, which no autoscaler has ordered" in caplog.text


async def test_a_removal_that_fails_is_tried_again() -> None:
    async with running_service() as service:
        await service.add_drained("prefill-1")
        service.controller = service.new_controller()
        await service.controller.begin()
        await service.decide()
        service.launcher.is_away = True
        await service.controller.wait_removed()
        assert service.launcher.removed == []
        service.launcher.is_away = False
        await service.decide()
        await service.controller.wait_removed()
        assert service.launcher.removed == ["prefill-1"]


async def test_a_pool_grows_although_an_operator_drains_one_of_its_workers() -> None:
    async with running_service() as service:
        await service.add_drained("prefill-9")
        await service.ask(10)
        decision = await service.decide()
        assert [(order.verb, order.role) for order in decision.orders] == [(Verb.ADD, P)]
        assert service.launcher.num_adds == decision.pools[P].desired - 1 >= 1


async def test_an_own_worker_that_has_drained_serves_again_before_one_is_added() -> None:
    async with running_service() as service:
        await service.add_drained("prefill-9")
        service.controller = service.new_controller()
        await service.controller.begin()
        await service.ask(40)
        deciding = asyncio.create_task(service.decide())
        order = await obey(service.cluster.workers["prefill-9"], pb.Credit(max_requests=8, max_tokens=2**20))
        decision = await deciding
        await service.controller.wait_removed()
        assert order.HasField("undrain")
        assert [(each.verb, each.role) for each in decision.orders] == [(Verb.KEEP, P)]
        assert (service.launcher.num_adds, service.launcher.removed) == (0, [])


async def test_an_order_for_which_there_is_no_worker_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A worker that an operator has started himself is beyond the bounds, and nothing here can remove it."""
    policy = replace(POLICY, prefill=PoolBounds(most=1))
    async with running_service(policy=policy) as service:
        await service.cluster.add(P, "by-hand")
        service.launcher.running.remove("prefill-0")
        decision = await service.decide()
        assert [(order.verb, order.role) for order in decision.orders] == [(Verb.DRAIN, P)]
        assert "drain of a prefill worker: there is none that was started here" in caplog.text


async def test_a_worker_that_an_operator_drains_is_not_removed() -> None:
    async with running_service() as service:
        await service.add_drained("prefill-1")
        for _ in range(60):
            await service.decide()
        assert service.launcher.removed == []
        assert {role for _, role in await service.launcher.names()} == {P, D}
