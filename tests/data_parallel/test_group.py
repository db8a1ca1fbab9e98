"""Ranks of a group enter each step together (rows E1–E14 of docs/design-sources.md)."""

import random
import time

import pytest

from contract.errors import InvalidRequestError, SettingError
from data_parallel.member import Member
from data_parallel.steps import CoordinatorSteps, ParticipantSteps, PartInfo
from engine.hosting.messages import Shutdown
from tests.data_parallel.group import Rank, has_stopped, running_group, until
from tests.engine_scheduling.stepping import POLICIES, fake_request, fake_settings
from tests.fakes.engine.fakes import CRASH_TOKEN, fake_answer


def passes(rank: Rank) -> list[str]:
    assert rank.runner is not None
    return rank.runner.passes


def until_idle(ranks: list[Rank], step: int) -> None:
    """Wait until all ranks have made this step, and have no further one to make."""
    until(lambda: all(rank.steps == (step, step) for rank in ranks))


def test_the_worked_trace() -> None:
    """E3, E8, E9, E10, E11, E12, E13: one request of one token at one of four ranks.

    One call up, four down, one pass each, and all wait.
    """
    with running_group(4, look_ahead=0) as ranks:
        ranks[0].add(fake_request("a", [1, 2, 3], max_tokens=1))
        ranks[0].wait(lambda rank: bool(rank.outputs and rank.outputs[-1].is_leg_finished))
        counts = [rank.member.counts for rank in ranks if rank.member]
        until(
            lambda: all(
                rank.steps == (1, 1) and count["received start_step"]
                for rank, count in zip(ranks, counts, strict=True)
            )
        )
        assert [count["sent start_step"] for count in counts] == [1, 0, 0, 0]
        assert counts[0]["received start_step of a rank"] == 1
        assert [count["sent start_step to all"] for count in counts] == [4, 0, 0, 0]
        assert [count["received start_step"] for count in counts] == [1, 1, 1, 1]
        time.sleep(0.2)
        assert [passes(rank) for rank in ranks] == [["real"], ["dummy"], ["dummy"], ["dummy"]]
        # E12: the step that only passes the finished request to the runner was none for the group.
        assert ranks[0].runner is not None and ranks[0].runner.batch_sizes == [3, 0]
        assert ranks[0].steps == (1, 1)
    assert [rank.ended for rank in ranks] == [True] * 4
    assert not any(rank.deaths for rank in ranks)


@pytest.mark.parametrize("look_ahead", [0, 1, 7, 24])
def test_look_ahead_bounds_calls_and_empty_steps(look_ahead: int) -> None:
    """E7, E16: one call in ``look_ahead + 1`` steps of work, and at most ``look_ahead`` empty steps after the last one."""
    num_tokens = 60
    with running_group(2, look_ahead=look_ahead) as ranks:
        ranks[1].add(fake_request("a", [1, 2, 3], max_tokens=num_tokens))
        ranks[1].wait(lambda rank: bool(rank.outputs and rank.outputs[-1].is_leg_finished))
        num_calls = -(-num_tokens // (look_ahead + 1))
        until_idle(ranks, num_calls * (look_ahead + 1))
        assert ranks[1].tokens_of("a#0.0") == fake_answer([1, 2, 3], num_tokens)
        assert ranks[1].member is not None and ranks[1].member.counts["sent start_step"] == num_calls
        num_empty = num_calls * (look_ahead + 1) - num_tokens
        assert num_empty <= look_ahead
        assert passes(ranks[1]) == ["real"] * num_tokens + ["dummy"] * num_empty
        assert passes(ranks[0]) == ["dummy"] * (num_tokens + num_empty)


@pytest.mark.parametrize("policy", POLICIES)
def test_random_arrivals_meet_in_every_step(policy: str) -> None:
    """E1, E14: whatever comes where and when, no rank waits in a pass for ever, and each answer is as it is alone."""
    drawn = random.Random(7)
    settings = fake_settings(scheduling_policy=policy)
    with running_group(3, look_ahead=3, settings=settings) as ranks:
        wanted = []
        for number in range(60):
            rank = drawn.choice(ranks)
            prompt = [drawn.randrange(900) for _ in range(drawn.randrange(1, 20))]
            num_tokens = drawn.randrange(1, 12)
            rank.add(fake_request(f"r{number}", prompt, max_tokens=num_tokens))
            wanted.append((rank, f"r{number}#0.0", fake_answer(prompt, num_tokens)))
            time.sleep(drawn.choice([0, 0, 0.002, 0.02]))
        for rank, key, answer in wanted:
            until(lambda: len(rank.tokens_of(key)) == len(answer))  # noqa: B023 called here only
            assert rank.tokens_of(key) == answer
        steps = max(rank.steps[1] for rank in ranks)
        until_idle(ranks, steps)
        assert len({len(passes(rank)) for rank in ranks}) == 1
    assert not any(rank.deaths for rank in ranks)


def test_all_leave_together_while_others_work() -> None:
    """A rank that is asked to end takes part in the steps of the others until they are asked, too."""
    with running_group(2, look_ahead=2) as ranks:
        ranks[0].add(fake_request("a", [1], max_tokens=200))
        ranks[0].wait(lambda rank: len(rank.outputs) > 2)
        ranks[1].inbox.put(Shutdown())
        ranks[0].wait(lambda rank: rank.outputs[-1].is_leg_finished)
        assert ranks[0].tokens_of("a#0.0") == fake_answer([1], 200)
        assert not has_stopped(ranks[1])
    assert [rank.ended for rank in ranks] == [True, True]
    assert not any(rank.deaths for rank in ranks)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_exception_in_one_engine_ends_all(failing: int) -> None:
    """E7, E19: the coordinator, or else every other rank, would end its process."""
    with running_group(3, look_ahead=4) as ranks:
        ranks[failing].add(fake_request("a", [1, CRASH_TOKEN], max_tokens=5))
        ranks[failing].wait(has_stopped)
        if failing:
            ranks[0].wait(lambda rank: bool(rank.deaths))
            assert f"rank {failing} of the group is gone" in ranks[0].deaths[0]
            return
        # The first of the others to end breaks the passes of the rest, which may notice that before.
        for rank in ranks[1:]:
            rank.wait(lambda rank: bool(rank.deaths) or has_stopped(rank))
        deaths = [reason for rank in ranks[1:] for reason in rank.deaths]
        assert set(deaths) == {"the coordinator of the group is gone"}


def test_a_place_is_taken_once() -> None:
    """E4, E5."""
    steps = CoordinatorSteps(dp_size=2, look_ahead=24)
    steps.reg_part(PartInfo(1, "host", 5), 2)
    with pytest.raises(InvalidRequestError, match="registered already, at host:5"):
        steps.reg_part(PartInfo(1, "other", 6), 2)
    with pytest.raises(InvalidRequestError, match="rank 2 of 2 does not belong"):
        steps.reg_part(PartInfo(2, "host", 5), 2)
    with pytest.raises(InvalidRequestError, match="rank 0 of 3 does not belong"):
        steps.reg_part(PartInfo(0, "host", 5), 3)
    steps.reg_part(PartInfo(0, "host", 4), 2)
    assert steps.is_complete and steps.parts[0] == PartInfo(0, "host", 4)


def test_the_coordinator_goes_ahead_once() -> None:
    """E6, E7: the second announcement of a step changes nothing."""
    steps = CoordinatorSteps(dp_size=2, look_ahead=24)
    assert steps.advance(1) and steps.step == 25
    assert not steps.advance(1) and not steps.advance(25) and steps.step == 25
    assert steps.advance(26) and steps.step == 50


def test_the_step_of_a_participant_only_grows() -> None:
    """E8, E10, E11."""
    steps = ParticipantSteps()
    assert (steps.is_behind, steps.new_step()) == (False, 1)
    steps.start_step(3)
    steps.start_step(2)
    assert (steps.is_behind, steps.coord_step) == (True, 3)
    assert [steps.new_step(), steps.new_step(), steps.new_step()] == [None, None, 4]


def test_a_rank_that_does_not_belong_is_refused() -> None:
    with running_group(2) as ranks:
        assert ranks[1].member is not None
        plan = ranks[1].member.plan
        with pytest.raises(SettingError, match="rank 1 of the group is registered already"):
            Member(plan, lambda _: None, lambda: 1)


def test_the_engines_of_a_group_do_not_speculate(caplog: pytest.LogCaptureFixture) -> None:
    settings = fake_settings(speculate="ngram")
    with running_group(2, settings=settings) as ranks:
        ranks[0].add(fake_request("a", [1, 1, 1, 1], max_tokens=9))
        ranks[0].wait(lambda rank: bool(rank.outputs and rank.outputs[-1].is_leg_finished))
        assert [len(output.token_ids) for output in ranks[0].outputs] == [1] * 9
    assert sum("do not speculate" in record.getMessage() for record in caplog.records) == 2
