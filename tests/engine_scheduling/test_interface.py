"""Schedulers are interchangeable: the engine uses the methods of the interface, and no part behind it."""

from collections.abc import Callable
from typing import Any

import pytest

from contract.outputs import FinishReason
from engine.core import EngineCore
from engine.hosting.messages import (
    AbortRequest,
    AddRequest,
    Call,
    CallResult,
    FromEngine,
    Shutdown,
    StepOutputs,
)
from engine.scheduling.interface import SchedulerInterface
from engine.scheduling.scheduler import Scheduler
from engine.startup import create_scheduler
from engine.stepping.loop import Inbox, StepLoop
from tests.engine_scheduling.stepping import fake_request, fake_settings
from tests.fakes.engine.fakes import fake_answer, start_fake_executor
from tests.fakes.engine.serial_scheduler import SerialScheduler

PROMPTS = [[n, n + 1, n + 2] * n for n in range(1, 5)]
LENGTHS = [5, 3, 7, 1]


def serial(_settings: Any, info: Any, *_: Any) -> SchedulerInterface:
    return SerialScheduler(info.num_blocks)


@pytest.mark.parametrize("make_scheduler", [create_scheduler, serial])
def test_another_scheduler_stands_behind_the_step_loop(
    make_scheduler: Callable[..., SchedulerInterface],
) -> None:
    """B20: requests come, are rejected, aborted and answered, utilities are called, and the loop ends."""
    core = EngineCore(fake_settings(), start=start_fake_executor, make_scheduler=make_scheduler)
    inbox, said = Inbox(), list[FromEngine]()

    def emit(message: FromEngine) -> None:
        said.append(message)
        ended = sum(
            one.is_leg_finished for out in said if isinstance(out, StepOutputs) for one in out.outputs
        )
        if ended == len(PROMPTS) + 2 and not any(isinstance(one, CallResult) for one in said):
            for number, name in enumerate(("stats", "counters", "debug_state", "check_integrity")):
                inbox.put(Call(number, name, []))
            inbox.put(Shutdown())

    for number, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        inbox.put(AddRequest(fake_request(f"r{number}", prompt, length)))
    inbox.put(AddRequest(fake_request("bad", [100_000], 3)))
    inbox.put(AddRequest(fake_request("unwanted", [1, 2], 30)))
    inbox.put(AbortRequest("unwanted", None, None))
    StepLoop(core, inbox, {0: emit}, idle_seconds=0.1).run()
    outputs = [one for message in said if isinstance(message, StepOutputs) for one in message.outputs]
    for number, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        own = [one for one in outputs if one.request_id == f"r{number}"]
        assert [token for one in own for token in one.token_ids] == fake_answer(prompt, length)
        assert own[-1].finish_reason is FinishReason.LENGTH
    assert {one.request_id: one.finish_reason for one in outputs if not one.token_ids} == {
        "bad": FinishReason.ERROR,
        "unwanted": FinishReason.ABORT,
    }
    answers = {one.call_id: one for one in said if isinstance(one, CallResult)}
    assert len(answers) == 4 and not any(one.error_kind for one in answers.values())
    assert core.scheduler.get_num_unfinished_requests() == 0 and core.scheduler.is_free()
    core.close()


def test_counts_of_requests_agree() -> None:
    """B15: unfinished ones run or wait; one that has finished counts until a step has named it to the runner."""
    core = EngineCore(fake_settings(max_num_seqs=1), start=start_fake_executor)
    scheduler = core.scheduler
    assert isinstance(scheduler, Scheduler) and not scheduler.has_requests()
    core.add_request(fake_request("a", [1], 2))
    core.add_request(fake_request("b", [2], 1))
    assert (scheduler.get_request_counts(), scheduler.get_num_unfinished_requests()) == ((0, 2), 2)
    core.step()
    assert scheduler.get_request_counts() == (1, 1) and not scheduler.has_finished_requests()
    core.step()
    assert scheduler.get_request_counts() == (0, 1) and scheduler.has_finished_requests()
    core.step()
    assert scheduler.get_request_counts() == (0, 0) and not scheduler.has_unfinished_requests()
    assert scheduler.has_finished_requests() and scheduler.has_requests()
    core.step()
    assert not scheduler.has_requests()
    core.close()
