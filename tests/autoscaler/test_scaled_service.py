"""The pools of ``kvbaton up --autoscale`` change on real processes, and no answer fails or differs."""

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.autoscaler.chats import chatting
from tests.autoscaler.scaled_up import on_paper, running_scaled
from tests.launch.children import wait_gone

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]


async def test_a_spike_adds_workers_of_both_roles_and_they_drain_after_it(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The time to the first added worker that serves is recorded."""
    timing = on_paper(prompt=0.6, step=0.13)
    async with (
        running_scaled(tmp_path, timing, "--prefill", "1:2", "--decode", "1:2") as scaled,
        chatting(scaled.service.http, 0.0, length=150) as chats,
    ):
        await scaled.after_decisions(10)
        chats.rate = 1.0
        await scaled.after_decisions(10)
        assert scaled.orders() == []
        chats.rate = 4.0
        begin = time.monotonic()
        await scaled.until_has_computed("prefill-1")
        seconds = round(time.monotonic() - begin, 1)
        record_property("seconds_to_the_first_added_worker", seconds)
        sys.stderr.write(f"autoscaler: the first added worker has served {seconds} s after the spike began\n")
        await scaled.until_serving(prefill=2, decode=2)
        shown = await top(scaled.router["admin"])
        in_one_line = " ".join(shown.split())  # the reasons may be longer than the terminal is wide
        assert re.search(r"autoscaler: serving 2 of 2 prefill \(.*\) \+ 2 of 2 decode \(", in_one_line), shown
        chats.rate = 0.5
        await scaled.until_serving(prefill=1, decode=1)
        assert await scaled.metric("kvbaton_drains_total", result="empty") == 2
        assert await scaled.metric("kvbaton_flips_total") == 0
        await scaled.until_line("(prefill|decode)-. ended", 2)
        orders = scaled.orders()
        for role in ("prefill", "decode"):
            changes = [found[0] for line in orders if (found := re.search(rf"{role} (\d→\d)", line))]
            assert changes == [f"{role} 1→2", f"{role} 2→1"], orders
    assert chats.wrong == []
    assert chats.num_right > 40


async def top(admin: str) -> str:
    """Return what ``kvbaton top`` shows."""
    command = (sys.executable, "-m", "cli.main", "top", "--admin", admin, "--once")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


async def test_with_a_fixed_total_a_worker_changes_its_role_where_that_helps_and_only_there(
    tmp_path: Path,
) -> None:
    """Long prompts need both prefill workers, even while one decode worker is too few; long answers after them do not.

    That is so by the times on paper and by their halves: where the machine is slow, its decode workers are busy, and the
    law halves the times of steps, too.
    """
    timing = on_paper(prompt=3.4, step=0.8)
    bounds = ("--prefill", "1:2", "--decode", "1:2", "--budget", "3")
    async with (
        running_scaled(tmp_path, timing, *bounds) as scaled,
        chatting(scaled.service.http, 2.0, length=400, most=4) as chats,
    ):
        await scaled.until_serving(prefill=2, decode=1)
        chats.most = 56
        async with asyncio.timeout(100):
            while not await scaled.metric("kvbaton_scaling_held_workers", pool="decode", reason="budget"):
                await asyncio.sleep(0.1)
        await scaled.after_decisions(6)
        assert await scaled.metric("kvbaton_flips_total") == 0
        chats.rate = 0.7
        chats.length = 900
        chats.most = None
        await scaled.until_line("a flip leaves prefill at")
        await scaled.until_serving(prefill=1, decode=2)
        assert await scaled.metric("kvbaton_flips_total", role="decode") == 1
        started = [line.split(" started")[0].rpartition(" ")[2] for line in scaled.lines(r" started \(pid")]
        assert started == ["router", "prefill-0", "decode-0", "prefill-1"]
    assert chats.wrong == []
    assert chats.num_right > 20


async def test_without_a_timing_file_it_decides_from_the_first_second_and_sends_no_request(
    tmp_path: Path,
) -> None:
    """The load comes when the ready file is there. A goal of a millisecond needs every worker that is allowed."""
    bounds = ("--prefill", "1:2", "--decode", "1:2", "--ttft-goal-ms", "1", "--itl-goal-ms", "1")
    async with (
        running_scaled(tmp_path, None, *bounds) as scaled,
        chatting(scaled.service.http, 6.0, length=100) as chats,
    ):
        await scaled.after_decisions(4)
        counted = await scaled.metric("kvbaton_request_success_total")
        held = await scaled.metric("kvbaton_num_requests_running")
        assert counted <= chats.num_right + len(chats.wrong) + held
        await scaled.until_line(r"(prefill|decode) 1→2 \(")
        chats.rate = 0.0
        async with asyncio.timeout(100):
            while await scaled.metric("kvbaton_num_requests_running"):
                await asyncio.sleep(0.1)
    assert chats.wrong == []
    assert chats.num_right > 0


async def test_pools_shrink_to_nothing_and_the_request_that_comes_then_waits_for_workers(
    tmp_path: Path,
) -> None:
    """The router stays ready, and the same happens again."""
    bounds = ("--prefill", "0:1", "--decode", "0:1")
    async with running_scaled(tmp_path, None, *bounds) as scaled:
        for number in (1, 2):
            await scaled.until_line(r"(prefill|decode)-0 ended \(pid", 2 * number)
            assert await scaled.workers() == {}
            assert await scaled.service.get_text(scaled.router["http"], "/ready")
            async with chatting(scaled.service.http, 1.0, length=60) as chats:
                async with asyncio.timeout(100):
                    while not chats.num_right:
                        await asyncio.sleep(0.1)
            assert chats.wrong == []
            await scaled.until_line(r"prefill 0→1 \(wake\).*decode 0→1 \(wake\)", number)


async def test_while_the_router_does_not_answer_nothing_changes_and_that_is_logged(tmp_path: Path) -> None:
    """Requests pile up in the frozen router. They are no spike when it goes on, and a restarted router is none."""
    timing = on_paper(prompt=0.35, step=0.05)
    bounds = ("--prefill", "1:3", "--decode", "1:3", "--log-level", "debug")
    async with running_scaled(tmp_path, timing, *bounds) as scaled:
        await scaled.after_decisions(10)
        async with chatting(scaled.service.http, 1.2, length=60) as chats:
            await scaled.after_decisions(12)
            router = scaled.router["pid"]
            os.kill(router, signal.SIGSTOP)
            try:
                held = await scaled.until_line("WARNING .* prefill 1: held, routers or launcher do not", 2)
            finally:
                os.kill(router, signal.SIGCONT)
            assert "decode 1: held" in held
            await scaled.after_decisions(20)
        number = await scaled.num_decisions()
        decided = len(scaled.lines(r"DEBUG .*autoscaler\.controller: prefill 1 \(.* \| decode 1 \("))
        assert decided in (number, number + 1)
        os.kill(router, signal.SIGKILL)
        await scaled.until_line("router ready", 2)
        await scaled.until_serving(prefill=1, decode=1)
        async with chatting(scaled.router["http"], 1.2, length=60) as later:
            await scaled.after_decisions(12)
        assert scaled.orders() == []
    assert chats.wrong == later.wrong == []
    assert chats.num_right > 20
    assert later.num_right > 0


async def test_a_worker_that_hangs_in_its_start_is_given_up_and_replaced(tmp_path: Path) -> None:
    """A decode worker starts at the same time: its start is the one that shows how long the other may take."""
    timing = on_paper(prompt=2.4, step=1.0, start=7.0)
    async with (
        running_scaled(tmp_path, timing, "--prefill", "1:2", "--decode", "1:2") as scaled,
        chatting(scaled.service.http, 2.0, length=60) as chats,
    ):
        started = await scaled.until_line(r"prefill-1 started \(pid")
        hanging = int(re.findall(r"pid (\d+)", started)[0])
        os.kill(hanging, signal.SIGSTOP)
        await scaled.until_line("decode-1 ready")
        await scaled.until_line(r"autoscaler\.controller: prefill 1→2 .*1 given up")
        await scaled.until_serving(prefill=2, decode=2)
        assert wait_gone(hanging)
        assert len(scaled.lines(r"prefill-1 started \(pid")) == 2
    assert chats.wrong == []
