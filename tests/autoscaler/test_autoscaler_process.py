"""``kvbaton autoscaler`` as a process beside real workers: killed in mid-decision, an engine that fails, edits by hand."""

import asyncio
import re
import signal
from pathlib import Path

import pytest

from tests.autoscaler.cases import D, P
from tests.autoscaler.chats import chatting
from tests.autoscaler.process_engine import ProcessEngine, Project, running_project
from tests.autoscaler.scaled_up import on_paper, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]


async def kill_during(project: Project, verb: str, *flags: str) -> None:
    """Start an autoscaler, and kill it while the engine works on its first call of this kind, which then ends."""
    engine = project.engine
    engine.held = verb
    engine.reached.clear()
    engine.may_end.clear()
    await project.autoscaler.start(*flags)
    await asyncio.wait_for(engine.reached.wait(), 120)
    assert await project.autoscaler.end(signal.SIGKILL) == -signal.SIGKILL
    engine.held = None
    engine.may_end.set()


async def test_an_autoscaler_that_is_killed_in_mid_decision_adds_and_removes_nothing_twice(
    tmp_path: Path,
) -> None:
    """A worker that is still ending may be ordered to stop by both autoscalers: an engine stops a container once."""
    bounds = ("--prefill", "1:2", "--decode", "1", "--shrink-after-seconds", "2")
    async with (
        running_project(tmp_path, on_paper(prompt=1.6, step=0.05)) as project,
        chatting(project.http, 2.0, length=60) as chats,
    ):
        engine = project.engine
        await kill_during(project, "create", *bounds)
        await kill_during(project, "start", *bounds)
        await project.autoscaler.start(*bounds)
        await project.until_serving(2)
        await project.after_decisions(6)
        assert engine.changes() == ["POST create shop-prefill-2", "POST start shop-prefill-2"]
        assert await project.autoscaler.end() == 0
        chats.rate = 0.1  # one worker suffices by the times on paper too, which a slow machine does not halve
        await kill_during(project, "stop", *bounds)
        await project.autoscaler.start(*bounds)
        await project.until_serving(1)
        await project.after_decisions(6)
        stops = set(engine.changes()[2:])
        assert len(stops) == 1, (stops, project.autoscaler.log.read_text()[-8000:])
        assert re.fullmatch("POST stop shop-prefill-[12]", stops.pop())
        await until_one_runs(engine)
        assert len(engine.running(D)) == 1
        assert await project.metric("kvbaton_drains_total", result="empty") == 1
    assert chats.wrong == []
    assert chats.num_right > 20


async def test_half_of_a_scale_up_that_fails_is_ordered_again_and_an_absent_engine_holds(
    tmp_path: Path,
) -> None:
    bounds = ("--prefill", "1:3", "--decode", "1")
    async with (
        running_project(tmp_path, on_paper(prompt=2.4, step=0.05)) as project,
        chatting(project.http, 2.0, length=60) as chats,
    ):
        engine = project.engine
        engine.broken.add("shop-prefill-3")
        await project.autoscaler.start(*bounds)
        await project.autoscaler.until_line(
            "WARNING autoscaler autoscaler.controller: add of a prefill worker has failed"
        )
        engine.broken.clear()
        await project.until_serving(3)
        half = [f"POST {verb} shop-prefill-{number}" for number in (2, 3) for verb in ("create", "start")]
        assert engine.changes() == [*half, "DELETE shop-prefill-3", *half[2:]]
        engine.is_away = True
        await project.after_decisions(2, reason="no_signals")
        await project.autoscaler.until_line("WARNING autoscaler autoscaler.controller: prefill 3: held")
        engine.is_away = False
        await project.after_decisions(6)
        assert len(engine.changes()) == 7
        assert project.autoscaler.lines("the workers that were started are not known")
    assert chats.wrong == []


async def test_numbers_that_are_edited_by_hand_are_kept_within_the_bounds_and_corrected_beyond_them(
    tmp_path: Path,
) -> None:
    async with (
        running_project(tmp_path, on_paper(prompt=0.5, step=0.05)) as project,
        chatting(project.http, 0.5, length=60) as chats,
    ):
        engine = project.engine
        autoscaler = project.autoscaler
        await autoscaler.start("--prefill", "1", "--decode", "1", "--shrink-after-seconds", "600")
        await autoscaler.until_line("prefill 1 (steady)")
        await engine.run_by_hand(P, 2)
        await autoscaler.until_line("prefill 2→1 (bounds)")
        await project.until_serving(1)
        await autoscaler.until_line("prefill 1 (steady)", len(autoscaler.lines("prefill 1 (steady)")) + 2)
        check_log(project, await project.num_decisions())
        await until_one_runs(engine)
        assert await autoscaler.end() == 0

        await autoscaler.start("--prefill", "1:2", "--decode", "1", "--shrink-after-seconds", "6")
        await engine.run_by_hand(P, 3)
        await autoscaler.until_line("prefill 2 (stabilizing)", 4)
        await autoscaler.until_line("prefill 2→1 (forecast)")
        await project.until_serving(1)
        assert await project.metric("kvbaton_drains_total", result="empty") == 2

        await until_one_runs(engine)
        [last] = engine.running(P)
        await engine.stop_by_hand(last)
        await autoscaler.until_line("prefill 0→1 (")
        await project.until_serving(1)
    assert chats.wrong == []


async def until_one_runs(engine: ProcessEngine) -> None:
    """Wait until one container of a prefill worker runs: a worker leaves its router before its container has ended."""
    await until(lambda: len(engine.running(P)) == 1, lambda: f"{engine.running(P)} run")


def check_log(project: Project, num_decisions: float) -> None:
    """Assert that each decision has been logged as one line."""
    lines = project.autoscaler.lines("autoscaler.controller: prefill ")
    assert all(" | decode " in line for line in lines)
    assert num_decisions <= len(lines) <= num_decisions + 1
