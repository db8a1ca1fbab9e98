"""Workers that may lend and fetch at once: what a router binds to them, and which answers leave them (law 4)."""

import asyncio
from typing import Any

import pytest

from contract.identity import Role
from protos import worker_pb2 as pb
from router.migration.migration import MigrationState
from router.routing.policy import PlacementRequest, never_bound, place
from router.routing.views import WorkerView, WorkerViews
from tests.fakes.router.worker import ScriptedWorker
from tests.router.cluster import PAIR, running_cluster
from tests.router.moves import SOURCE, TARGET, moves
from tests.router.test_worker_admin import HELLO

FULL: dict[str, Any] = {"max_requests": 256, "max_tokens": 2**20}


def view(name: str, role: Role, *, is_unsettled: bool) -> WorkerView:
    return WorkerView(worker_id=name, role=role, max_requests=9, max_tokens=2**20, is_unsettled=is_unsettled)


@pytest.mark.parametrize("unsettled", [(), ("p",), ("d",), ("p", "d"), ("p", "d", "e")])
def test_no_hand_over_is_bound_between_two_unsettled_workers(unsettled: tuple[str, ...]) -> None:
    roles = {"p": Role.PREFILL, "d": Role.DECODE, "e": Role.DECODE}
    views = WorkerViews.of(view(name, role, is_unsettled=name in unsettled) for name, role in roles.items())
    wish = PlacementRequest(num_prompt_tokens=4, num_answer_tokens=4)
    for turn in range(4):
        placement = place(views, wish, turn, never_bound(views))
        assert placement is not None
        pair = placement.hand_over
        assert pair is None or not set(pair) <= set(unsettled)
        assert (pair is None) is (len(unsettled) == 3)


async def test_a_prompt_is_computed_where_it_is_decoded_while_both_workers_are_unsettled() -> None:
    async with running_cluster(HELLO, PAIR) as cluster:
        for worker in cluster.workers.values():
            worker.stream.grant(pb.Credit(**FULL, is_unsettled=True))
        await cluster.until(lambda state: all(w["is_unsettled"] for w in state["workers"]))
        assert (await cluster.post("/v1/completions", {"prompt": "x"}))[0] == 200
        (call,) = cluster.workers["decode-0"].received.decodes
        assert not call.HasField("source") and not cluster.workers["prefill-0"].received.prefills
        cluster.workers["decode-0"].stream.grant(pb.Credit(**FULL))
        await cluster.until(lambda state: not all(w["is_unsettled"] for w in state["workers"]))
        assert (await cluster.post("/v1/completions", {"prompt": "x"}))[0] == 200
        assert len(cluster.workers["prefill-0"].received.prefills) == 1


async def test_no_answer_is_moved_to_an_unsettled_worker() -> None:
    async with moves() as made:
        made.target.stream.grant(pb.Credit(**FULL, is_unsettled=True))
        await made.cluster.until(lambda state: any(w["is_unsettled"] for w in state["workers"]))
        assert not made.migrator.has_target(made.attached())
        assert await made.move() is MigrationState.NO_TARGET
        made.target.stream.grant(pb.Credit(**FULL))
        await made.cluster.until(lambda state: not any(w["is_unsettled"] for w in state["workers"]))
        assert await made.move() is MigrationState.MOVED
        await made.ends()


async def test_answers_leave_a_worker_only_once_it_is_unsettled() -> None:
    """Until then another router may not have received that it drains."""
    async with moves() as made:
        made.source.stream.grant(pb.Credit(is_draining=True, drain_seconds=600.0))
        await made.cluster.until(lambda state: any(w["is_draining"] for w in state["workers"]))
        await asyncio.sleep(0.15)
        assert not made.source.received.hand_offs
        made.source.stream.grant(pb.Credit(is_draining=True, drain_seconds=600.0, is_unsettled=True))
        await made.ends()
        assert len(made.source.received.hand_offs) == 1


async def test_answers_leave_a_worker_that_has_become_a_prefill_worker() -> None:
    """They are moved; nothing begins again, although a single failure would end the answer."""
    async with moves() as made:
        made.source.stream.set_role("prefill", 1)
        made.source.stream.grant(pb.Credit(**FULL, is_unsettled=True))
        await made.ends()
        assert len(made.source.received.hand_offs) == 1 and not made.source.received.cancels
        assert len(made.target.received.decodes) == 1
        metrics = await made.cluster.metrics()
        assert metrics['kvbaton_migrations_total{reason="flip",result="moved"}'] == 1
        assert metrics['kvbaton_flips_total{role="prefill"}'] == 1


async def test_answers_stay_on_a_worker_that_decodes_in_its_new_role() -> None:
    async with moves() as made:
        made.source.stream.set_role("both", 1)
        made.source.stream.grant(pb.Credit(**FULL, is_unsettled=True))
        await made.cluster.until(lambda state: any(w["is_unsettled"] for w in state["workers"]))
        await asyncio.sleep(0.15)
        assert not made.source.received.hand_offs
        assert await made.move() is MigrationState.MOVED
        await made.ends()


async def test_a_role_has_no_credit_before_the_worker_sends_it() -> None:
    """Between the two messages nothing is bound, and the worker counts as attached in its new role."""
    async with running_cluster(HELLO, PAIR) as cluster:
        worker = await cluster.add(Role.DECODE, "decode-1")
        worker.stream.grant(pb.Credit(**FULL, number=1))
        await worker.stream.next_order()
        worker.stream.set_role("prefill", 1)
        await cluster.until(lambda state: state["workers"][-1]["role"] == "prefill")
        attached = cluster.service._path.registry.get("decode-1")
        assert (attached.capacity.credit.max_requests, attached.has_credit) == (0, True)
        assert cluster.service._path.registry.views.unsettled == {"decode-1"}


async def former(worker: ScriptedWorker, number: int, **credit: Any) -> int:
    """Send a credit, and return how many legs of the former role the router reports in its answer."""
    worker.stream.grant(pb.Credit(**FULL, number=number, **credit))
    return await report(worker, number)


async def report(worker: ScriptedWorker, number: int) -> int:
    """Return how many legs of the former role the router reports next for the credit of this number."""
    while True:
        order = await worker.stream.next_order()
        if order.credit_use.number == number:
            return order.credit_use.num_former


async def test_a_router_reports_legs_of_the_former_role_until_they_have_ended() -> None:
    async with moves(target=None) as made:
        worker = made.source
        assert await former(worker, 1) == 0
        worker.stream.set_role("both", 1)
        assert await former(worker, 2, is_unsettled=True) == 1
        assert made.attached(SOURCE).capacity.num_requests == 0
        made.asking.pop().cancel()
        async with asyncio.timeout(10):
            assert await report(worker, 2) == 0, "on its own"
        assert await former(worker, 3) == 0


async def test_a_router_reports_moves_away_from_a_worker_until_they_are_over() -> None:
    """The worker serves again; its lease may still be read."""
    async with moves() as made:
        made.source.player.may_hand_off.clear()
        draining: dict[str, Any] = {"is_draining": True, "drain_seconds": 600.0, "is_unsettled": True}
        made.source.stream.grant(pb.Credit(**draining))
        async with asyncio.timeout(10):
            while not made.attached().capacity.former.num_moves:
                await asyncio.sleep(0.005)
        assert await former(made.source, 1, **draining) == 1
        made.source.player.may_hand_off.set()
        async with asyncio.timeout(10):
            assert await report(made.source, 1) == 0, "on its own"
        await made.ends()
        assert await former(made.source, 2) == 0
        assert made.attached(TARGET).capacity.former.num_legs == 0
