"""A data-parallel group is one worker of the autoscaler: it starts, counts, drains and leaves as a whole."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from autoscaler.arbiter import best_flip
from autoscaler.decision import Verb
from autoscaler.groups import by_launcher
from autoscaler.law import decide
from autoscaler.memory import Memory
from autoscaler.policy import PoolBounds
from autoscaler.signals import PoolSignals
from protos import worker_pb2 as pb
from tests.autoscaler.cases import POLICY, QUIET, TIMING, D, P, ready, signals
from tests.autoscaler.test_controller import POLICY as QUICK_POLICY
from tests.autoscaler.test_controller import SLOW, Service, running_service
from tests.fakes.router.worker import ScriptedWorker
from tests.router.test_worker_admin import obey

SIZE = 2
PAIRS = replace(QUICK_POLICY, prefill=PoolBounds(most=6, devices=SIZE, data_parallel_size=SIZE))


def rank(number: int, **changes: Any) -> dict[str, Any]:
    facts = {
        "id": f"decode-1-{number}",
        "group": "host:9300",
        "group_size": SIZE,
        "role": "decode",
        "state": "serving",
        "num_legs": 3 + number,
        "max_requests": 8,
        "num_leg_tokens": 100,
        "max_tokens": 1000,
        "num_running": 2,
    }
    return {**facts, **changes}


def test_the_ranks_of_a_group_are_one_worker_with_the_name_that_its_launcher_knows() -> None:
    alone = {**rank(0), "id": "decode-0", "group": None}
    found = by_launcher([rank(0, num_running=None), alone, rank(1, drained_by="operator")])
    assert found.keys() == {"decode-0", "decode-1"}
    assert found["decode-0"] is alone
    group = found["decode-1"]
    assert (group["id"], group["first_rank"]) == ("decode-1", "decode-1-0")
    assert (group["num_legs"], group["max_requests"], group["num_running"]) == (7, 16, 2)
    assert (group["num_leg_tokens"], group["max_tokens"]) == (200, 2000)
    assert group["drained_by"] == "operator"


def test_a_group_that_was_started_by_hand_has_the_name_of_its_coordinator() -> None:
    assert by_launcher([rank(0, id="one"), rank(1, id="two")]).keys() == {"host:9300"}


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (["serving"], "starting"),
        (["serving", "starting"], "starting"),
        (["serving", "serving"], "serving"),
        (["changing", "serving"], "changing"),
        (["draining", "serving"], "draining"),
        (["empty", "serving"], "draining"),
        (["empty", "draining"], "draining"),
        (["empty", "empty"], "empty"),
        (["empty"], "empty"),
        (["leaving", "empty"], "empty"),
        (["leaving", "leaving"], "leaving"),
    ],
)
def test_a_group_has_a_state_when_all_of_its_ranks_have_it(states: list[str], state: str) -> None:
    found = by_launcher(rank(number, state=each) for number, each in enumerate(states))
    assert found["decode-1"]["state"] == state


def test_a_group_changes_its_role_until_all_of_its_ranks_have_it() -> None:
    assert by_launcher([rank(0), rank(1, role="prefill")])["decode-1"]["state"] == "changing"


@pytest.mark.parametrize("rate", [3.0, 8.0])
def test_the_law_needs_fewer_groups_than_workers(rate: float) -> None:
    """The times are those of a rank, whether it belongs to a group or not."""
    load = replace(QUIET, arrival_rate=rate)
    groups = replace(
        POLICY,
        prefill=PoolBounds(most=8, data_parallel_size=4),
        decode=PoolBounds(most=8, data_parallel_size=2),
    )

    def needed(policy: Any, prefill: PoolSignals, decode: PoolSignals) -> dict[Any, float]:
        decision, _ = decide(policy, TIMING, Memory(), signals(5.0, prefill, decode, load))
        return {role: pool.forecast for role, pool in decision.pools.items()}

    workers = needed(POLICY, ready(4, 1.0), ready(4, 20.0))
    fewer = needed(groups, replace(ready(4, 1.0), num_ready=1), replace(ready(4, 20.0), num_ready=2))
    assert fewer[P] == pytest.approx(workers[P] / 4)
    assert fewer[D] == pytest.approx(workers[D] / 2)


def test_a_group_takes_no_place_of_a_worker() -> None:
    present = {P: 3, D: 3}
    wanted = {P: 1, D: 5}
    needed = {P: 0.5, D: 5.0}
    assert best_flip(POLICY, present, wanted, needed) is not None
    grouped = replace(POLICY, prefill=PoolBounds(most=8, data_parallel_size=2))
    assert best_flip(grouped, present, wanted, needed) is None


async def add_group(service: Service, name: str, size: int = SIZE) -> list[ScriptedWorker]:
    """Attach ranks of a prefill group; fewer than ``SIZE`` of them are a group that is starting."""
    if name not in service.launcher.running:
        service.launcher.running.append(name)
    facts = {"group": f"{name}:9300", "group_size": SIZE}
    return [await service.cluster.add(P, f"{name}-{number}", **facts) for number in range(size)]


async def test_a_group_is_drained_as_one_and_removed_when_all_of_its_ranks_are_empty() -> None:
    async with running_service((), policy=PAIRS) as service:
        await service.cluster.add(D, "decode-0")
        ranks = await add_group(service, "prefill-0")
        await add_group(service, "prefill-1")
        for _ in range(36):
            assert not (await service.decide()).orders
        deciding = asyncio.create_task(service.decide())
        for each in ranks:
            await obey(each, pb.Credit(is_draining=True, drain_seconds=30))
        decision = await deciding
        assert [(order.verb, order.role, order.number) for order in decision.orders] == [(Verb.DRAIN, P, 1)]
        assert (decision.pools[P].present, decision.pools[P].desired) == (2, 1)
        # Routers count each rank, and so does the number that they publish beside that.
        assert (await service.cluster.metrics())['kvbaton_desired_workers{pool="prefill"}'] == SIZE
        ranks[1].stream.grant(pb.Credit(is_draining=True, is_empty=True))
        await service.cluster.until(lambda state: sum(w["is_empty"] for w in state["workers"]) == 1)
        await service.decide()
        await service.controller.wait_removed()
        assert service.launcher.removed == []
        ranks[0].stream.grant(pb.Credit(is_draining=True, is_empty=True))
        await service.cluster.until(lambda state: sum(w["is_empty"] for w in state["workers"]) == 2)
        await service.decide()
        await service.controller.wait_removed()
        assert service.launcher.removed == ["prefill-0"]


async def test_a_group_with_a_missing_rank_is_one_worker_that_starts() -> None:
    async with running_service((), policy=PAIRS) as service:
        await service.cluster.add(D, "decode-0")
        await add_group(service, "prefill-0")
        await add_group(service, "prefill-1", size=1)
        decision = await service.decide()
        assert decision.pools[P].present == 2
        await service.ask(20)
        decision = await service.decide(3 * SLOW.start_seconds + 1.0)
        await service.controller.wait_removed()
        assert next(order.verb for order in decision.orders if order.role is P) is Verb.FORGET
        assert service.launcher.removed == ["prefill-1"]


async def test_a_load_orders_groups_and_not_ranks() -> None:
    """A pool of groups gets the load of a pool of single workers, and the autoscaler orders half as many starts."""
    numbers = []
    for policy, size in ((QUICK_POLICY, 1), (PAIRS, SIZE)):
        async with running_service((), policy=policy) as service:
            await service.cluster.add(D, "decode-0")
            if size == 1:
                await service.cluster.add(P, "prefill-0")
            else:
                await add_group(service, "prefill-0")
            await service.ask(40)
            decision = await service.decide()
            numbers.append(decision.pools[P].forecast)
    assert numbers[1] == pytest.approx(numbers[0] / SIZE, rel=0.1)
