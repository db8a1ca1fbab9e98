"""An autoscaler that fails begins again, and of two on one service one decides: on real routers with scripted workers."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest

from autoscaler.running import Autoscaler, Lease, lease_seconds, new_holder
from contract.identity import Role
from launch.kept_process import RestartPolicy
from launch.router_admin import RouterAdmin
from tests.autoscaler.cases import POLICY, TIMING
from tests.fakes.router.script import Script
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.text.tiny_model import END

INTERVAL = 0.02
QUICK = RestartPolicy(first_delay_seconds=0.01, last_delay_seconds=0.05)


@dataclass
class Launcher:
    """Lists two workers. failing: numbers of the calls that raise an error that no caller expects."""

    failing: set[int] = field(default_factory=set)
    num_calls: int = 0

    async def names(self) -> Sequence[tuple[str, Role]]:
        self.num_calls += 1
        if self.num_calls in self.failing:
            raise ZeroDivisionError(f"call {self.num_calls}")
        return [("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE)]

    async def add(self, role: Role) -> str:
        raise NotImplementedError(role)

    async def remove(self, name: str) -> None:
        raise NotImplementedError(name)


@dataclass
class Service:
    """Routers with a pair of workers each, and a clock that only the test moves."""

    clusters: Sequence[Cluster]
    session: aiohttp.ClientSession
    now: float = 0.0

    @property
    def admins(self) -> list[RouterAdmin]:
        return [RouterAdmin(one.service.addresses.admin, self.session) for one in self.clusters]

    def lease(
        self, holder: str, seconds: float = 30.0, routers: Sequence[RouterAdmin] | None = None
    ) -> Lease:
        async def known() -> Sequence[RouterAdmin]:
            return self.admins if routers is None else routers

        return Lease(holder, known, seconds, lambda: self.now)

    def autoscaler(self, launcher: Launcher, lease: Lease) -> Autoscaler:
        async def known() -> list[RouterAdmin]:
            return self.admins

        return Autoscaler(POLICY, TIMING, launcher, known, lease, restarts=QUICK)


@asynccontextmanager
async def running_service(num_routers: int = 1) -> AsyncIterator[Service]:
    async with AsyncExitStack() as stack:
        routers = [
            await stack.enter_async_context(running_cluster(Script(tokens=[END]), PAIR))
            for _ in range(num_routers)
        ]
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Service(routers, session)


@asynccontextmanager
async def deciding(autoscaler: Autoscaler) -> AsyncIterator[None]:
    running = asyncio.create_task(autoscaler.run(INTERVAL))
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()


async def test_after_an_error_another_controller_decides_and_routers_count_that(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_service() as service:
        launcher = Launcher(failing={2, 4, 5})
        autoscaler = service.autoscaler(launcher, service.lease("one"))
        async with deciding(autoscaler), asyncio.timeout(20):
            while (await service.clusters[0].metrics()).get("kvbaton_autoscaler_restarts") != 3:
                await asyncio.sleep(INTERVAL)
        assert launcher.num_calls > 6
        failures = [record for record in caplog.records if "the autoscaler has failed" in record.getMessage()]
        assert ["ZeroDivisionError" in str(record.exc_info) for record in failures] == [True] * 3


async def test_the_second_autoscaler_waits_and_says_so_and_takes_over_when_the_lease_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_service() as service:
        first = service.lease("first")
        assert await first.renew()
        launcher = Launcher()
        second = service.autoscaler(launcher, service.lease("second", 1.0))
        async with deciding(second), asyncio.timeout(20):
            while second.lease.other is None:
                await asyncio.sleep(INTERVAL)
            for _ in range(5):
                assert await first.renew()
                await asyncio.sleep(INTERVAL)
            assert (launcher.num_calls, second.last, second.lease.is_valid) == (0, None, False)
            said = [record for record in caplog.records if "another autoscaler" in record.getMessage()]
            assert len(said) == 1
            assert "(first; its lease at router" in said[0].getMessage()
            metrics = await service.clusters[0].metrics()
            assert metrics["kvbaton_autoscaler_lease_refusals_total"] >= 1
            await first.release()
            while second.last is None:
                await asyncio.sleep(INTERVAL)
        assert second.lease.other is None


async def test_a_lease_ends_by_itself() -> None:
    async with running_service() as service:
        dead = service.lease("dead", 0.3)
        assert await dead.renew()
        other = service.lease("other")
        assert not await other.renew()
        async with asyncio.timeout(20):
            while not await other.renew():
                await asyncio.sleep(INTERVAL)
        assert not await dead.renew()
        assert dead.other == "other"


async def test_of_two_that_begin_together_one_has_all_routers_and_the_other_none() -> None:
    async with running_service(2) as service:
        for number in range(10):
            pair = [service.lease(f"{name} {number}") for name in ("a", "b")]
            granted = await asyncio.gather(*(lease.renew() for lease in pair))
            assert sorted(granted) == [False, True]
            assert sorted(lease.is_valid for lease in pair) == [False, True]
            await asyncio.gather(*(lease.release() for lease in pair))


async def test_what_a_refused_autoscaler_was_granted_elsewhere_is_given_back() -> None:
    """The first router of the order has lost its lease, because it was started again."""
    async with running_service(2) as service:
        first, last = sorted(service.admins, key=lambda router: router.address)
        holder = service.lease("holder", routers=[last])
        assert await holder.renew()
        assert not await service.lease("other").renew()
        assert await service.lease("third", routers=[first]).renew()


async def test_routers_that_do_not_answer_refuse_nothing_and_grant_nothing() -> None:
    async with running_service() as service:
        away = RouterAdmin("127.0.0.1:1", service.session)
        alone = service.lease("alone", routers=[away])
        assert await alone.renew()
        assert not alone.is_valid
        both = service.lease("both", routers=[away, *service.admins])
        assert await both.renew()
        assert both.is_valid
        service.now = 30.0
        assert not both.is_valid


@pytest.mark.parametrize("body", [b"", b"{}", b'{"holder":"","seconds":3}', b'{"holder":"a","seconds":1e9}'])
async def test_what_is_no_lease_is_refused(body: bytes) -> None:
    async with running_service() as service:
        url = f"http://{service.clusters[0].service.addresses.admin}/admin/scaling/lease"
        async with service.session.put(url, data=body) as response:
            assert response.status == 400
            assert "no lease" in (await response.json())["error"]["message"]


def test_each_autoscaler_has_a_name_of_its_own_and_a_lease_of_several_decisions() -> None:
    assert new_holder("up") != new_holder("up")
    assert lease_seconds(5.0) == 30.0
    assert lease_seconds(30.0) == 120.0
