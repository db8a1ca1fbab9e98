"""The target of a move compiles the answer's grammar before the source is ordered to hand the answer off."""

import asyncio

import pytest

import router.migration.preparation
from contract.errors import InternalError, OverloadedError
from contract.identity import Role
from router.migration.migration import MigrationState
from tests.router.moves import ANSWER, SOURCE, STALL, TARGET, TOKENS, Moves, moves, only_on, stalling

GRAMMAR = {"guided_regex": "[a-z]+"}


async def begins(made: Moves) -> None:
    """Wait until the target is asked to prepare the answer."""
    async with asyncio.timeout(20):
        await made.target.received.wait_for(lambda each: len(each.preparations) == 1)


async def test_the_source_is_not_touched_before_the_target_has_compiled_the_grammar() -> None:
    async with moves(fields=GRAMMAR) as made:
        made.target.player.may_prepare.clear()
        moving = asyncio.create_task(made.move())
        await begins(made)
        for _ in range(10):
            await made.cluster.debug_state()
        assert not made.source.received.hand_offs and not moving.done()
        made.target.player.may_prepare.set()
        assert await moving is MigrationState.MOVED
        await made.ends()
        (leg,) = made.target.received.preparations
        (call,) = made.target.received.decodes
        task = leg.task
        assert task.sampling.grammar == call.task.sampling.grammar
        assert task.sampling.grammar.text == GRAMMAR["guided_regex"]
        assert task.eos_token_ids == call.task.eos_token_ids
        assert list(task.prompt_token_ids)[-STALL:] == TOKENS[:STALL] and task.first_index == STALL
        assert len(task.prompt_token_ids) == STALL + 1, "the prompt is not needed"


async def test_the_target_connects_to_the_source_before_the_first_answer_moves_between_them() -> None:
    """An answer without a grammar needs nothing else, so that the second one is moved at once."""
    async with moves(target=None) as made:
        await made.ask()
        await made.cluster.add(Role.DECODE, TARGET)
        (first, second) = made.runs
        made.target.player.may_prepare.clear()
        moving = asyncio.create_task(made.migrator.move(first, made.attached()))
        await begins(made)
        assert not made.source.received.hand_offs and not moving.done()
        made.target.player.may_prepare.set()
        assert await moving is MigrationState.MOVED
        made.target.player.may_prepare.clear()
        assert await made.migrator.move(second, made.attached()) is MigrationState.MOVED
        await made.ends()
        (leg,) = made.target.received.preparations
        registration = made.attached().registration
        assert leg.source.worker_id == SOURCE and leg.source.boot_id == registration.boot_id
        assert leg.source.control_address == registration.control_address
        assert not leg.task.sampling.HasField("grammar") and len(leg.task.prompt_token_ids) == STALL + 1


@pytest.mark.parametrize("error", [OverloadedError("too many"), InternalError("no such call")])
async def test_a_target_that_cannot_prepare_it_takes_the_answer_too(
    error: OverloadedError | InternalError,
) -> None:
    async with moves(fields=GRAMMAR) as made:
        only_on(made.target, refuse_preparation=error)
        assert await made.move() is MigrationState.MOVED
        await made.ends()
        assert len(made.target.received.preparations) == 1


async def test_a_preparation_that_takes_too_long_does_not_keep_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router.migration.preparation, "PREPARATION_SECONDS", 0.05)
    async with moves(fields=GRAMMAR) as made:
        made.target.player.may_prepare.clear()
        assert await made.move() is MigrationState.MOVED
        await made.ends()


async def test_a_target_that_dies_while_it_prepares_leaves_the_answer_where_it_is() -> None:
    async with moves(stalling(), fields=GRAMMAR) as made:
        made.target.player.may_prepare.clear()
        moving = asyncio.create_task(made.move())
        await begins(made)
        await made.target.stop()
        assert await moving is MigrationState.ENDED
        assert not made.source.received.hand_offs and len(made.runs[0].known_tokens) == STALL
        assert ANSWER.startswith(bytes(token - 5 for token in made.runs[0].known_tokens).decode())
        made.asking[0].cancel()


async def test_the_death_of_the_source_ends_the_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay takes the room that was reserved; it does not wait for a compilation."""
    monkeypatch.setattr(router.migration.preparation, "PREPARATION_SECONDS", 3600.0)
    async with moves(fields=GRAMMAR, max_replays=1) as made:
        made.target.player.may_prepare.clear()
        moving = asyncio.create_task(made.move())
        await begins(made)
        await made.source.die()
        assert await moving is MigrationState.ENDED
        await made.ends()
