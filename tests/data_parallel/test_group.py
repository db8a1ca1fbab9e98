"""Ranks of a group enter each step together (rows E1–E16 of docs/design-sources.md)."""

import random
import select
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from contract.errors import InvalidRequestError, SettingError
from data_parallel.member import Member
from data_parallel.shared_steps import SharedSteps, create_steps, machine_identity
from data_parallel.steps import CoordinatorSteps, ParticipantSteps, PartInfo
from engine.hosting.messages import Health, Shutdown
from tests.data_parallel.group import Rank, has_stopped, running_group, until
from tests.engine_scheduling.stepping import POLICIES, fake_request, fake_settings
from tests.fakes.engine.fakes import CRASH_TOKEN, fake_answer

ways = pytest.mark.parametrize("num_sharing", [pytest.param(0, id="calls"), pytest.param(None, id="memory")])
"""Ranks announce steps by calls to a coordinator, or in shared memory."""


def passes(rank: Rank) -> list[str]:
    assert rank.runner is not None
    return rank.runner.passes


def until_idle(ranks: list[Rank], step: int) -> None:
    """Wait until all ranks have made this step, and have no further one to make."""
    until(lambda: all(rank.steps == (step, step) for rank in ranks))


@ways
def test_the_worked_trace(num_sharing: int | None) -> None:
    """E3, E8, E9, E10, E11, E12, E13: one request of one token at one of four ranks.

    One call up, four down, one pass each, and all wait. E15: or one announcement in memory, which wakes the three others.
    """
    is_shared = num_sharing is None
    with running_group(4, look_ahead=0, num_sharing=num_sharing) as ranks:
        for rank in ranks:  # they wait for input, and for nothing else, once they have reported their state
            rank.wait(lambda it: isinstance(it.said[-1], Health))
        ranks[0].add(fake_request("a", [1, 2, 3], max_tokens=1))
        ranks[0].wait(lambda rank: bool(rank.outputs and rank.outputs[-1].is_leg_finished))
        counts = [rank.member.counts for rank in ranks if rank.member]
        until(
            lambda: all(
                rank.steps == (1, 1) and (is_shared or count["received start_step"])
                for rank, count in zip(ranks, counts, strict=True)
            )
        )
        assert [count["sent start_step"] for count in counts] == [1, 0, 0, 0]
        assert counts[0]["received start_step of a rank"] == (0 if is_shared else 1)
        assert [count["sent start_step to all"] for count in counts] == [0 if is_shared else 4, 0, 0, 0]
        assert [count["received start_step"] for count in counts] == [0 if is_shared else 1] * 4
        time.sleep(0.2)
        assert [passes(rank) for rank in ranks] == [["real"], ["dummy"], ["dummy"], ["dummy"]]
        # E12: the step that only passes the finished request to the runner was none for the group.
        assert ranks[0].runner is not None and ranks[0].runner.batch_sizes == [3, 0]
        assert ranks[0].steps == (1, 1)
    assert [rank.ended for rank in ranks] == [True] * 4
    assert not any(rank.deaths for rank in ranks)


@pytest.mark.parametrize("look_ahead", [0, 1, 7, 24])
@ways
def test_look_ahead_bounds_calls_and_empty_steps(num_sharing: int | None, look_ahead: int) -> None:
    """E7, E16: one call in ``look_ahead + 1`` steps of work, and at most ``look_ahead`` empty steps after the last one."""
    num_tokens = 60
    with running_group(2, look_ahead=look_ahead, num_sharing=num_sharing) as ranks:
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
@ways
def test_random_arrivals_meet_in_every_step(num_sharing: int | None, policy: str) -> None:
    """E1, E14: whatever comes where and when, no rank waits in a pass for ever, and each answer is as it is alone."""
    drawn = random.Random(7)
    settings = fake_settings(scheduling_policy=policy)
    with running_group(3, look_ahead=3, settings=settings, num_sharing=num_sharing) as ranks:
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


@ways
def test_all_leave_together_while_others_work(num_sharing: int | None) -> None:
    """A rank that is asked to end takes part in the steps of the others until they are asked, too."""
    with running_group(2, look_ahead=2, num_sharing=num_sharing) as ranks:
        ranks[0].add(fake_request("a", [1], max_tokens=200))
        ranks[0].wait(lambda rank: len(rank.outputs) > 2)
        ranks[1].inbox.put(Shutdown())
        ranks[0].wait(lambda rank: rank.outputs[-1].is_leg_finished)
        assert ranks[0].tokens_of("a#0.0") == fake_answer([1], 200)
        assert not has_stopped(ranks[1])
    assert [rank.ended for rank in ranks] == [True, True]
    assert not any(rank.deaths for rank in ranks)


@pytest.mark.parametrize("failing", [0, 1, 2])
@ways
def test_an_exception_in_one_engine_ends_all(num_sharing: int | None, failing: int) -> None:
    """E7, E19: the coordinator, or else every other rank, would end its process."""
    with running_group(3, look_ahead=4, num_sharing=num_sharing) as ranks:
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


def test_a_group_calls_if_one_rank_is_elsewhere() -> None:
    """E15, E18: memory is shared by all ranks or by none."""
    with running_group(2, look_ahead=0, num_sharing=1) as ranks:
        ranks[0].add(fake_request("a", [1, 2, 3], max_tokens=2))
        until_idle(ranks, 2)
        assert ranks[0].member is not None
        assert ranks[0].member.counts["received start_step of a rank"] == 2
    assert not any(rank.deaths for rank in ranks)


def test_a_machine_is_known_by_its_temporary_folder() -> None:
    """It is equal in all processes of this user that have the folder, and is known on Linux only."""
    identity = machine_identity()
    assert identity == machine_identity()
    assert bool(identity) is (sys.platform == "linux")
    assert tempfile.gettempdir() in identity or not identity


def test_a_number_in_shared_memory_is_announced_once_and_read_by_all(tmp_path: Path) -> None:
    """A rank that joins later reads what was announced before it had a bell."""
    create_steps(tmp_path, 3)
    with ExitStack() as stack:
        first, second = (SharedSteps(tmp_path, rank, 3, look_ahead=4) for rank in range(2))
        stack.callback(first.close)
        stack.callback(second.close)
        assert first.step == 0
        assert first.advance(1)
        assert select.select([second], [], [], 10.0)[0] == [second]
        second.clear_bell()
        assert select.select([first, second], [], [], 0.0)[0] == []
        assert (first.step, second.step) == (5, 5)
        assert not second.advance(5)
        assert second.advance(6)
        assert not first.advance(10)
        third = SharedSteps(tmp_path, 2, 3, look_ahead=4)
        stack.callback(third.close)
        assert (first.step, third.step) == (10, 10)
        for step in range(10, 10_000, 4):  # more announcements than a bell holds
            third.advance(step)
        assert second.step == third.step == first.step > 9_998


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
