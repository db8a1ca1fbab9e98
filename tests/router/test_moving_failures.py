"""A move fails, is refused or cancelled at each of its stages: what happens to the answer and to both workers."""

import asyncio
from itertools import count
from typing import Any

import pytest

import router.migration.migrator
from contract.errors import InvalidRequestError, NotFoundError, OverloadedError
from contract.identity import Role
from protos import worker_pb2 as pb
from router.migration.migration import Migration, MigrationState
from tests.fakes.router.entries import handed_over_entry
from tests.router.moves import (
    ANSWER,
    SOURCE,
    STALL,
    TARGET,
    TOKENS,
    Moves,
    moves,
    only_on,
    stalling,
)
from tests.router.test_ends import nothing_is_left

# The source.


async def test_an_answer_that_ended_before_the_order_came_releases_the_target() -> None:
    async with moves(stalling(refuse_hand_off=NotFoundError("it has ended"))) as made:
        assert await made.move() is MigrationState.ENDED
        await made.cluster.until(lambda state: [w["num_legs"] for w in state["workers"]] == [0, 1, 0])
        assert not made.target.received.decodes
        made.asking[0].cancel()


async def test_a_refusal_changes_nothing_and_the_next_attempt_has_the_next_number() -> None:
    async with moves(stalling(refuse_hand_off=InvalidRequestError("it waits")), max_replays=1) as made:
        for _ in range(3):
            assert await made.move() is MigrationState.REFUSED
        assert [order.next_attempt for order in made.source.received.hand_offs] == [1, 1, 1]
        await made.source.die()
        await made.ends()
        assert [call.task.attempt for call in made.target.received.decodes] == [1]
        assert made.count("refused") == 3


async def test_a_source_that_dies_with_the_order_costs_one_replay() -> None:
    async with moves(stalling(dies_at_hand_off=True), max_replays=1) as made:
        assert await made.move() is MigrationState.REPLAYED
        await made.ends()
        (call,) = made.target.received.decodes
        assert call.task.attempt == 2 and call.source.worker_id == "prefill-0"
        assert made.count("replayed") == 1


async def test_an_answer_that_ends_while_the_order_is_on_the_way_ends_once() -> None:
    """The source emits the rest of it, and answers the order only then."""
    async with moves() as made:
        made.source.player.may_hand_off.clear()
        moving = asyncio.create_task(made.move())
        await made.source.received.wait_for(lambda each: len(each.hand_offs) == 1)
        request_id = made.source.received.hand_offs[0].request_id
        rest = TOKENS[STALL : len(ANSWER)]
        made.source.stream.send(
            pb.TokenEntry(request_id=request_id, first_index=STALL, token_ids=rest, finish_reason="length")
        )
        await made.ends()
        made.source.player.may_hand_off.set()
        assert await moving is MigrationState.ENDED
        assert not made.target.received.decodes


@pytest.mark.parametrize("num_missing", [1, -1])
async def test_a_source_that_miscounts_is_not_believed(num_missing: int) -> None:
    """The KV would not be that of the tokens that were delivered: the answer is computed again."""
    async with moves(max_replays=1) as made:
        made.source.player.may_hand_off.clear()
        moving = asyncio.create_task(made.move())
        await made.source.received.wait_for(lambda each: len(each.hand_offs) == 1)
        (order,) = made.source.received.hand_offs
        made.source.stream.send(handed_over_entry(order, STALL + num_missing))
        await made.source.received.wait_for(lambda each: len(each.cancels) == 1)
        assert made.source.received.cancels[0].attempt == order.next_attempt
        await made.ends()
        made.source.player.may_hand_off.set()
        assert await moving is MigrationState.REPLAYED


async def test_what_nobody_ordered_to_be_handed_off_is_replayed() -> None:
    async with moves(max_replays=1) as made:
        request_id = made.source.received.decodes[0].task.request_id
        made.source.stream.send(handed_over_entry(pb.HandOffRequest(request_id=request_id), STALL))
        await made.ends()


# The target.


async def test_a_target_that_was_lost_before_the_hand_over_costs_one_replay() -> None:
    async with moves(max_replays=1) as made:
        made.source.player.may_hand_off.clear()
        moving = asyncio.create_task(made.move())
        await made.source.received.wait_for(lambda each: len(each.hand_offs) == 1)
        await made.target.die()
        await made.cluster.until(lambda state: len(state["workers"]) == 2)
        made.source.player.may_hand_off.set()
        assert await moving is MigrationState.REPLAYED
        await made.source.received.wait_for(lambda each: len(each.cancels) == 1)
        assert made.source.received.cancels[0].attempt == 1
        await made.ends()


@pytest.mark.parametrize("how", ["dies", "fails"])
async def test_a_target_that_fails_before_its_first_token_costs_one_replay(how: str) -> None:
    """The lease is withdrawn, by the number of the attempt that it belongs to."""
    trouble = (
        {"die_at": STALL} if how == "dies" else {"fail_at": STALL, "error": OverloadedError("no blocks")}
    )
    async with moves(max_replays=1) as made:
        only_on(made.target, **trouble)
        assert await made.move() is MigrationState.REPLAYED
        await made.source.received.wait_for(lambda each: len(each.cancels) == 1)
        assert made.source.received.cancels[0].attempt == 1
        calls = made.target.received.decodes
        assert [call.source.worker_id for call in calls].count(SOURCE) == 1, "it is no second target"
        only_on(made.target)
        await made.ends()
        assert made.count("replayed") == 1


async def test_a_source_that_dies_while_it_lends_costs_one_replay() -> None:
    async with moves(max_replays=1) as made:
        only_on(made.target, stall_at=STALL)
        moving = asyncio.create_task(made.move())
        await made.target.received.wait_for(lambda each: len(each.decodes) == 1)
        only_on(made.target)
        await made.source.die()
        assert await moving is MigrationState.REPLAYED
        await made.ends()


# The second target.

THIRD = "third"
FAILURES: dict[str, dict[str, Any]] = {
    "refuses": {"refuse": OverloadedError("no room")},
    "fails": {"fail_at": STALL, "error": OverloadedError("no blocks")},
    "dies": {"die_at": STALL},
    "is lost before the hand-over": {},
    "drains": {"stall_at": STALL},
    "hangs, and is found dead": {"stall_at": STALL},
    "is silent": {"stall_at": STALL},
}


async def fails(made: Moves, how: str) -> "asyncio.Task[MigrationState]":
    """Begin a move whose first target fails in this way, and whose second one is THIRD if it is attached by then."""
    only_on(made.target, **FAILURES[how])
    made.source.player.may_hand_off.clear()
    moving = asyncio.create_task(made.move())
    await made.source.received.wait_for(lambda each: len(each.hand_offs) == 1)
    await made.cluster.add(Role.DECODE, THIRD)
    if how == "is lost before the hand-over":
        await made.target.die()
        await made.cluster.until(lambda state: len(state["workers"]) == 3)
    made.source.player.may_hand_off.set()
    if "stall_at" in FAILURES[how]:
        await made.target.received.wait_for(lambda each: len(each.decodes) == 1)
    if how == "drains":
        made.target.stream.grant(pb.Credit(is_draining=True, drain_seconds=600.0))
    if how == "hangs, and is found dead":
        await made.target.die()
    return moving


@pytest.mark.parametrize("how", FAILURES)
async def test_a_second_target_fetches_what_the_source_still_lends(how: str) -> None:
    """max_replays=0: nothing is computed again. It is the same attempt, by whose number the lease is known."""
    async with moves() as made:
        moving = await fails(made, how)
        assert await moving is MigrationState.MOVED
        await made.ends()
        (order,) = made.source.received.hand_offs
        (call,) = made.cluster.workers[THIRD].received.decodes
        assert (call.task.attempt, call.task.first_index) == (order.next_attempt, STALL)
        assert call.source.transfer_id == order.transfer_id
        assert not made.source.received.cancels, "the lease stays until it is read"
        assert [each.attempt for each in made.target.received.cancels] == (
            [1] if how in ("drains", "is silent") else []
        )
        assert made.count("moved") == 1
        (record,) = made.metrics.moves.recent
        assert record.targets == [TARGET, THIRD], "a report can tell whose fault the pause was"


@pytest.mark.parametrize("why", ["it shows signs of life", "no other worker could take it"])
async def test_a_slow_target_is_waited_for(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.migration.migrator, "_SILENT_SECONDS", 0.05)
    async with moves() as made:
        only_on(made.target, token_delay_seconds=0.2)
        if why == "it shows signs of life":
            signs = count()
            monkeypatch.setattr(Migration, "progress", property(lambda _: next(signs)))
            moving = asyncio.create_task(made.move())
            await made.target.received.wait_for(lambda each: len(each.decodes) == 1)
            await made.cluster.add(Role.DECODE, THIRD)
            assert await moving is MigrationState.MOVED
        else:
            assert await made.move() is MigrationState.MOVED
        await made.ends()
        (record,) = made.metrics.moves.recent
        assert record.targets == [TARGET]


async def test_after_two_targets_that_failed_the_answer_is_computed_again() -> None:
    async with moves(max_replays=1) as made:
        only_on(made.target, **FAILURES["fails"])
        made.source.player.may_hand_off.clear()
        moving = asyncio.create_task(made.move())
        await made.source.received.wait_for(lambda each: len(each.hand_offs) == 1)
        for name in (THIRD, "fourth"):
            only_on(await made.cluster.add(Role.DECODE, name), **FAILURES["fails"])
        made.source.player.may_hand_off.set()
        assert await moving is MigrationState.REPLAYED
        await made.source.received.wait_for(lambda each: len(each.cancels) == 1)
        assert made.source.received.cancels[0].attempt == 1
        await made.ends()
        calls = [call for name in (THIRD, "fourth") for call in made.cluster.workers[name].received.decodes]
        assert [call.task.attempt for call in calls if call.source.worker_id == SOURCE] == [1]
        assert made.count("replayed") == 1


@pytest.mark.parametrize(
    "what", ["room", "cancel", "death of the source", "deadline of its drain", "no room"]
)
async def test_while_the_second_target_has_no_room(what: str) -> None:
    """The answer waits for it, for a moment; whatever ends the attempt meanwhile ends the wait, and the lease."""
    async with moves(max_replays=1) as made:
        only_on(made.target, **FAILURES["fails"])
        made.source.player.may_hand_off.clear()
        moving = asyncio.create_task(made.move())
        await made.source.received.wait_for(lambda each: len(each.hand_offs) == 1)
        third = await made.cluster.add(Role.DECODE, THIRD)
        third.stream.grant(pb.Credit(max_requests=1, max_tokens=2**20))
        await made.cluster.until(lambda state: any(w["max_requests"] == 1 for w in state["workers"]))
        hold = made.attached(THIRD).capacity.hold("", 1)
        made.source.player.may_hand_off.set()
        await made.cluster.until(lambda state: state["num_in_line"] == 1)
        only_on(made.target)
        if what == "room":
            hold.release()
            assert await moving is MigrationState.MOVED
        elif what == "cancel":
            made.asking.pop().cancel()
            assert await moving is MigrationState.ENDED
        else:
            if what == "death of the source":
                await made.source.die()
            elif what == "deadline of its drain":
                made.source.stream.grant(pb.Credit(is_draining=True, drain_seconds=0.0))
            assert await moving is MigrationState.REPLAYED
        if what != "room":
            hold.release()
            assert not third.received.decodes or what == "death of the source"
        if what not in ("room", "death of the source"):
            await made.source.received.wait_for(lambda each: len(each.cancels) == 1)
            assert made.source.received.cancels[0].attempt == 1
        await made.ends()


# The client.


async def test_a_cancel_before_the_hand_over_names_the_next_attempt() -> None:
    """The source may receive the order first: its lease belongs to the next attempt."""
    async with moves() as made:
        made.source.player.may_hand_off.clear()
        moving = asyncio.create_task(made.move())
        await made.source.received.wait_for(lambda each: len(each.hand_offs) == 1)
        made.asking[0].cancel()
        await made.source.received.wait_for(lambda each: len(each.cancels) == 1)
        assert made.source.received.cancels[0].attempt == 1
        made.source.player.may_hand_off.set()
        assert await moving is MigrationState.ENDED
        await nothing_is_left(made.cluster)
        assert not made.target.received.decodes


async def test_a_cancel_after_the_hand_over_ends_lease_and_target() -> None:
    async with moves() as made:
        only_on(made.target, stall_at=STALL)
        moving = asyncio.create_task(made.move())
        await made.target.received.wait_for(lambda each: len(each.decodes) == 1)
        made.asking[0].cancel()
        for worker in (made.source, made.target):
            await worker.received.wait_for(lambda each: len(each.cancels) == 1)
            assert worker.received.cancels[0].attempt == 1
        assert await moving is MigrationState.ENDED
        await nothing_is_left(made.cluster)


async def test_a_move_that_is_given_up_leaves_the_answer_where_it_is() -> None:
    """Before the order, nothing has changed; after it, a hand-over that comes all the same costs one replay."""
    async with moves(max_replays=1) as made:
        hold = made.attached(TARGET).capacity.hold("", 2**20)
        moving = asyncio.create_task(made.move())
        await made.cluster.until(lambda state: state["num_in_line"] == 1)
        moving.cancel()
        await asyncio.wait({moving})
        hold.release()
        assert not made.source.received.hand_offs
        made.source.player.may_hand_off.clear()
        moving = asyncio.create_task(made.move())
        await made.source.received.wait_for(lambda each: len(each.hand_offs) == 1)
        moving.cancel()
        await asyncio.wait({moving})
        made.source.player.may_hand_off.set()
        (order,) = made.source.received.hand_offs
        made.source.stream.send(handed_over_entry(order, STALL))
        await made.ends()
