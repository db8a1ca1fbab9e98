"""An answer moves to another worker: what can be moved, when, to which one, and how the answer continues there."""

import asyncio

import pytest

from contract.errors import InvalidRequestError, PeerUnreachableError
from contract.identity import Role
from protos import worker_pb2 as pb
from router.migration.migration import MigrationState
from router.migration.migrator import Migrator
from tests.fakes.router.script import Script
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.router.moves import (
    ANSWER,
    NO_CREDIT,
    SOURCE,
    STALL,
    TARGET,
    TOKENS,
    Moves,
    moves,
    only_on,
    stalling,
)
from tests.router.test_ends import TEXT, nothing_is_left
from tests.router.test_replay import texts


@pytest.mark.parametrize("role", [Role.DECODE, Role.AGGREGATED])
async def test_an_answer_continues_at_the_target_without_an_attempt_that_fails(role: Role) -> None:
    """max_replays=0: a failure would end it. The target fetches from the source what the tokens but the last took."""
    async with moves(target=role) as made:
        assert await made.move() is MigrationState.MOVED
        await made.ends()
        (order,) = made.source.received.hand_offs
        (call,) = made.target.received.decodes
        (first,) = made.source.received.decodes
        assert (order.attempt, order.next_attempt, order.choice) == (0, 1, 0)
        source = made.attached().registration
        assert call.source == pb.TransferSource(
            transfer_id=order.transfer_id,
            worker_id=SOURCE,
            boot_id=source.boot_id,
            control_address=source.control_address,
        )
        assert (call.task.attempt, call.task.first_index) == (1, STALL)
        prompt = list(first.task.prompt_token_ids)
        assert list(call.task.prompt_token_ids) == [*prompt, *TOKENS[: STALL - 1]]
        assert call.task.sampling == first.task.sampling
        assert not made.source.received.cancels and not made.target.received.cancels
        assert made.count("moved") == 1
        metrics = await made.cluster.metrics()
        assert not any("replays_total{" in name for name in metrics)


async def test_an_aggregated_answer_is_moved_too() -> None:
    async with running_cluster(stalling(), (Role.AGGREGATED,), max_replays=0) as cluster:
        made = Moves(cluster)
        await made.ask()
        await cluster.add(Role.AGGREGATED, TARGET)
        (run,) = made.runs
        assert await made.migrator.move(run, made.attached("both-0")) is MigrationState.MOVED
        await made.ends()
        assert made.target.received.decodes[0].source.worker_id == "both-0"


async def test_it_is_moved_again_and_again() -> None:
    """Each time to a new worker, after each token: the numbers of its attempts grow, and no token is lost."""

    def script(task: pb.Task) -> Script:
        return Script(tokens=TOKENS, stall_at=None if task.attempt == 8 else STALL + task.attempt)

    async with moves(script, target=None) as made:
        name = SOURCE
        for attempt in range(8):
            added = await made.cluster.add(Role.DECODE, f"target-{attempt}")
            (run,) = made.runs
            assert await made.migrator.move(run, made.attached(name)) is MigrationState.MOVED
            async with asyncio.timeout(20):
                while attempt < 7 and len(run.known_tokens) < STALL + attempt + 1:
                    await asyncio.sleep(0.005)
            await made.cluster.workers[name].stop()
            await made.cluster.until(lambda state: len(state["workers"]) == 2)
            name = added.worker_id
        await made.ends()


async def test_what_the_client_has_not_read_is_not_lost() -> None:
    """The tokens that wait in the router count as sent: the target continues behind them."""
    async with moves() as made:
        (run,) = made.runs
        made.asking[0].cancel()
        await made.cluster.until(lambda state: not any(state["requests"].values()))
        tracked = run.tracked
        with (
            made.path.runs.unread.open("") as account,
            made.path.runs.open(run.request, [tracked], account) as (slow,),
        ):
            await made.cluster.workers[TARGET].stop()
            await made.cluster.until(lambda state: len(state["workers"]) == 2)
            tokens = list((await slow.next()).tokens)
            async with asyncio.timeout(20):
                while len(slow.known_tokens) < STALL:
                    await asyncio.sleep(0.005)
            await made.cluster.add(Role.DECODE, "other")
            unread = STALL - len(tokens)
            assert unread > 0
            assert await made.migrator.move(slow, made.attached()) is MigrationState.MOVED
            reason = None
            while reason is None:
                batch = await slow.next()
                tokens += batch.tokens
                reason = batch.finish_reason
        assert [token.token_id for token in tokens] == TOKENS[: len(ANSWER)], "16 tokens are the default"
        assert [token.index for token in tokens] == list(range(len(ANSWER)))


# Nothing is touched before there is room.


async def test_without_room_at_a_target_the_source_is_not_touched() -> None:
    async with moves() as made:
        made.target.stream.grant(NO_CREDIT)
        await made.cluster.until(lambda state: any(not w["max_requests"] for w in state["workers"]))
        assert await made.move() is MigrationState.NO_TARGET
        made.target.stream.grant(pb.Credit(max_requests=1, max_tokens=2**20))
        await made.cluster.until(lambda state: all(w["max_requests"] for w in state["workers"]))
        hold = made.attached(TARGET).capacity.hold("", 1)  # the only place there is taken
        moving = asyncio.create_task(made.move())
        await made.cluster.until(lambda state: state["num_in_line"] == 1)
        assert not made.source.received.hand_offs and not moving.done()
        hold.release()
        assert await moving is MigrationState.MOVED
        await made.ends()


async def test_a_move_goes_before_all_requests_that_were_not_begun() -> None:
    async with moves() as made:
        only_on(made.target)
        for worker in made.cluster.workers.values():
            worker.stream.grant(pb.Credit(max_requests=1, max_tokens=2**20))
        await made.cluster.until(lambda state: all(w["max_requests"] == 1 for w in state["workers"]))
        hold = made.attached(TARGET).capacity.hold("", 1)
        waiting = asyncio.create_task(texts(made.cluster))
        await made.cluster.until(lambda state: state["num_in_line"] == 1)
        (run,) = [run for run in made.runs if run.known_tokens]
        moving = asyncio.create_task(made.migrator.move(run, made.attached()))
        await made.cluster.until(lambda state: state["num_in_line"] == 2)
        made.source.stream.grant(NO_CREDIT)
        await made.cluster.until(lambda state: any(not w["max_requests"] for w in state["workers"]))
        hold.release()
        assert await moving is MigrationState.MOVED
        assert "".join(await waiting) == ANSWER
        await made.ends()


async def test_no_worker_is_its_own_target_or_one_that_answers_leave() -> None:
    """Law 4: two workers that lend to each other could both wait for blocks."""
    async with moves(target=None) as made:
        assert await made.move() is MigrationState.NO_TARGET
        await made.cluster.add(Role.DECODE, TARGET)
        with made.attached(TARGET).capacity.former.moving():
            assert await made.move() is MigrationState.NO_TARGET
            await made.cluster.add(Role.DECODE, "third")
            assert await made.move() is MigrationState.MOVED
        assert made.cluster.workers["third"].received.decodes and not made.target.received.decodes
        await made.ends()


async def test_a_worker_that_answers_leave_while_a_move_waits_for_it_is_no_target() -> None:
    """The move ends, and is tried again."""
    async with moves() as made:
        made.target.stream.grant(pb.Credit(max_requests=1, max_tokens=2**20))
        await made.cluster.until(lambda state: any(w["max_requests"] == 1 for w in state["workers"]))
        target = made.attached(TARGET).capacity
        hold = target.hold("", 1)
        moving = asyncio.create_task(made.move())
        await made.cluster.until(lambda state: state["num_in_line"] == 1)
        with target.former.moving():
            hold.release()
            assert await moving is MigrationState.ENDED
        assert not made.source.received.hand_offs
        assert await made.move() is MigrationState.MOVED
        await made.ends()


async def test_a_target_that_cannot_reach_the_source_is_not_chosen() -> None:
    async with moves() as made:
        made.path.runs.unreachable.record_failure(
            made.attached(), made.attached(TARGET), PeerUnreachableError("cut")
        )
        assert await made.move() is MigrationState.NO_TARGET
        await made.cluster.add(Role.DECODE, "third")
        assert await made.move() is MigrationState.MOVED
        assert not made.target.received.decodes
        await made.ends()


async def test_a_client_that_holds_its_share_is_moved_all_the_same() -> None:
    """It begins nothing: what it holds at the source is released."""
    async with moves(max_key_share=0.01) as made:
        made.path.runs.queue._shares.note("another client")
        assert await made.move() is MigrationState.MOVED
        await made.ends()


# What can be moved.


@pytest.mark.parametrize("known", [1, len(TOKENS) - 1], ids=["it has just begun", "one token is left"])
async def test_what_has_just_begun_or_is_nearly_over_is_not_moved(known: int) -> None:
    """The prompt may not be computed yet; and a move takes longer than one token."""
    async with running_cluster(stalling(known), PAIR, max_replays=1) as cluster:
        made = Moves(cluster)
        made.asking.append(asyncio.create_task(made_texts(cluster)))
        async with asyncio.timeout(20):
            while not any(len(run.known_tokens) == known for run in made.runs):
                await asyncio.sleep(0.005)
        await cluster.add(Role.DECODE, TARGET)
        assert await made.move() is MigrationState.ENDED
        assert not made.source.received.hand_offs
        await made.source.die()
        assert "".join(await made.asking[0]) == ANSWER


async def made_texts(cluster: Cluster) -> list[str]:
    """One completion that ends with its last token by length."""
    async with asyncio.timeout(30):
        events = await cluster.stream(TEXT, {"prompt": "x", "max_tokens": len(TOKENS)})
    return [event["choices"][0]["text"] for event in events[:-1]]


async def test_the_choices_of_a_prompt_move_one_after_another() -> None:
    """Later ones find the prompt in the target's cache."""
    async with running_cluster(stalling(), PAIR, max_replays=0) as cluster:
        made = Moves(cluster)
        asking = asyncio.create_task(cluster.post(TEXT, {"prompt": "x", "n": 4}))
        async with asyncio.timeout(20):
            while sum(len(run.known_tokens) == STALL for run in made.runs) < 4:
                await asyncio.sleep(0.005)
        target = await cluster.add(Role.DECODE, TARGET)
        made.source.player.may_hand_off.clear()
        ends: list[int] = []
        former = made.attached().capacity.former
        former._on_nothing_left = lambda: ends.append(len(made.source.received.hand_offs))
        moving = asyncio.create_task(made.migrator.move_all(made.attached(), made.runs))
        await made.source.received.wait_for(lambda each: len(each.hand_offs) == 1)
        await asyncio.sleep(0.05)
        assert len(made.source.received.hand_offs) == 1, "no other choice is moved meanwhile"
        made.source.player.may_hand_off.set()
        assert await moving == {MigrationState.MOVED: 4}
        assert ends == [4], "between two moves the worker is still one that answers leave"
        status, body = await asking
        assert (status, [choice["text"] for choice in body["choices"]]) == (200, [ANSWER] * 4)
        assert sorted(call.task.choice for call in target.received.decodes) == [0, 1, 2, 3]
        assert all(max(1, call.task.num_choices) == 1 for call in target.received.decodes)
        await nothing_is_left(cluster)


@pytest.mark.parametrize(
    ("num_answers", "num_contexts", "num_at_once"),
    [(5, 0, 2), (50, 0, 3), (8, 4, 4), (8, 100, 8)],
    ids=["two long ones", "a twentieth", "as many as the tokens allow", "all"],
)
async def test_few_move_at_once_and_those_with_the_most_tokens_left_first(
    num_answers: int, num_contexts: int, num_at_once: int
) -> None:
    """num_contexts: the length of so many of them together is the limit of what may move at a time."""
    async with running_cluster(stalling(), PAIR, max_replays=0) as cluster:
        made = Moves(cluster)
        lengths = [len(TOKENS) + number for number in range(num_answers)]
        asking = [
            asyncio.create_task(cluster.post(TEXT, {"prompt": "x", "max_tokens": length}))
            for length in lengths
        ]
        async with asyncio.timeout(60):
            while sum(len(run.known_tokens) == STALL for run in made.runs) < num_answers:
                await asyncio.sleep(0.01)
        await cluster.add(Role.DECODE, TARGET)
        made.source.player.may_hand_off.clear()
        num_tokens = len(made.runs[0].request.prompt_token_ids) + STALL
        path = made.path
        migrator = Migrator(path.registry, path.runs, made.metrics.moves, num_contexts * num_tokens)
        moving = asyncio.create_task(migrator.move_all(made.attached(), made.runs))
        await made.source.received.wait_for(lambda each: len(each.hand_offs) == num_at_once)
        await asyncio.sleep(0.05)
        assert len(made.source.received.hand_offs) == num_at_once
        made.source.player.may_hand_off.set()
        assert await moving == {MigrationState.MOVED: num_answers}
        for answer in asking:
            assert (await answer)[1]["choices"][0]["text"] == ANSWER
        by_id = {call.task.request_id: call.task.sampling.max_tokens for call in made.source.received.decodes}
        moved = [by_id[order.request_id] for order in made.source.received.hand_offs]
        # Those at once are sent by as many calls, of which any may arrive first.
        assert sorted(moved[:num_at_once]) == sorted(lengths)[-num_at_once:]


# The trigger.


async def test_a_drain_moves_what_the_worker_decodes_and_nothing_waits_for_its_deadline() -> None:
    async with moves() as made:
        made.source.stream.grant(pb.Credit(is_draining=True, drain_seconds=600.0, is_unsettled=True))
        await made.ends()
        assert len(made.source.received.hand_offs) == 1 and not made.source.received.cancels
        metrics = await made.cluster.metrics()
        assert metrics['kvbaton_migrations_total{reason="drain",result="moved"}'] == 1
        assert metrics["kvbaton_migration_pause_seconds_count"] == 1
        (move,) = (await made.cluster.debug_state())["moves"]
        assert (move["source"], move["targets"]) == (SOURCE, [TARGET])
        assert move["pause_seconds"] > 0 and move["ordered_at"] < move["handed_off_at"]
        assert move["num_steps"] == 1, "the target has no other answer"


async def test_a_drain_tries_again_what_was_refused() -> None:
    """It was preempted, or computed its prompt: some time later it can be handed off."""
    async with moves(stalling(refuse_hand_off=InvalidRequestError("it waits"))) as made:
        made.source.stream.grant(pb.Credit(is_draining=True, drain_seconds=600.0, is_unsettled=True))
        await made.source.received.wait_for(lambda each: len(each.hand_offs) == 3)
        (leg,) = made.source.player._legs.values()
        leg.script = Script(tokens=TOKENS)
        await made.ends()
