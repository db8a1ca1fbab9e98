"""Processes are added, retired and reconciled with a list while the supervisor runs."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from contract.errors import SettingError, UnavailableError
from launch.kept_process import ProcessState, RestartPolicy
from launch.supervisor import Supervisor
from tests.launch.children import PATIENCE_SECONDS, spec, wait_gone
from tests.launch.supervision import QUICK, Watcher, read, running

ROUTER = spec("router")
NEEDS = ("router",)


def names(ready_file: Path) -> list[str]:
    return [process["name"] for process in read(ready_file)["processes"]]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_an_added_process_gets_the_facts_it_needs_and_is_kept_running(tmp_path: Path) -> None:
    ready_file = tmp_path / "ready.json"
    async with running([ROUTER], ready_file) as (supervisor, watcher):
        supervisor.add(spec("decode-0", needs=NEEDS, note=lambda known: known["router"]["http"]))
        facts = (await supervisor.wait_ready())["decode-0"]
        assert facts["note"] == "127.0.0.1:1"
        assert names(ready_file) == ["router", "decode-0"]
        await watcher.wait_for("decode-0", ProcessState.READY)
        os.kill(facts["pid"], signal.SIGKILL)
        again = await watcher.wait_for("decode-0", ProcessState.READY)
        assert again["pid"] != facts["pid"]
        assert supervisor.num_restarts == {"decode-0": 1}
    assert wait_gone(again["pid"])


async def test_a_failing_added_process_is_retried_and_the_others_keep_serving(tmp_path: Path) -> None:
    """A wrong flag of a new worker must not end the service that asked for one more."""
    lives = iter(["fails", "fails", "well"])
    ready_file = tmp_path / "ready.json"
    async with running([ROUTER], ready_file) as (supervisor, _):
        router = supervisor.facts["router"]["pid"]
        supervisor.add(spec("decode-0", lambda _: next(lives), needs=NEEDS))
        await asyncio.wait_for(supervisor.wait_ready(), PATIENCE_SECONDS)
        assert supervisor.num_restarts == {"decode-0": 2}
        assert supervisor.facts["router"]["pid"] == router
        assert names(ready_file) == ["router", "decode-0"]


async def test_the_ready_file_is_updated_while_an_added_process_starts(tmp_path: Path) -> None:
    ready_file = tmp_path / "ready.json"
    async with running([ROUTER, spec("decode-0", needs=NEEDS)], ready_file) as (supervisor, watcher):
        supervisor.add(spec("decode-1", "loads", needs=NEEDS))
        await watcher.wait_for("decode-1", ProcessState.STARTED)
        os.kill(supervisor.facts["decode-0"]["pid"], signal.SIGKILL)
        await watcher.wait_for("decode-0", ProcessState.READY)
        assert read(ready_file)["processes"][1]["pid"] == supervisor.facts["decode-0"]["pid"]


async def test_a_retired_process_ends_and_is_not_started_again(tmp_path: Path) -> None:
    ready_file = tmp_path / "ready.json"
    specs = [ROUTER, spec("decode-0", needs=NEEDS), spec("decode-1", needs=NEEDS)]
    async with running(specs, ready_file) as (supervisor, watcher):
        before = supervisor.facts
        await supervisor.retire("decode-0")
        assert not is_alive(before["decode-0"]["pid"])
        assert (await watcher.wait_for("decode-0", ProcessState.ENDED)) == before["decode-0"]
        assert names(ready_file) == ["router", "decode-1"]
        await asyncio.sleep(0.2)  # longer than the delay of a restart
        assert watcher.events.empty()
        assert supervisor.facts == {name: before[name] for name in ("router", "decode-1")}
        assert not supervisor.num_restarts


async def test_a_retired_process_has_its_drain_time_and_needs_no_waiting_caller() -> None:
    policy = RestartPolicy(grace_seconds=0.3)
    drains = replace(spec("decode-0", "drains"), drain_seconds=60.0)
    async with running([drains], policy=policy) as (supervisor, watcher):
        pid = supervisor.facts["decode-0"]["pid"]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(supervisor.retire("decode-0"), 1.0)  # longer than the grace
        assert is_alive(pid)
        assert supervisor.facts == {}
        os.kill(pid, signal.SIGTERM)  # with the second one the child has drained
        await watcher.wait_for("decode-0", ProcessState.ENDED)
        assert not is_alive(pid)


async def test_a_retired_process_that_does_not_drain_in_time_is_killed() -> None:
    policy = RestartPolicy(grace_seconds=0.05)
    stubborn = replace(spec("decode-0", "stubborn"), drain_seconds=0.05)
    async with running([stubborn], policy=policy) as (supervisor, _):
        pid = supervisor.facts["decode-0"]["pid"]
        await supervisor.retire("decode-0")
        assert not is_alive(pid)


async def test_a_process_that_hangs_before_it_is_ready_gets_no_drain_time() -> None:
    """It has no work; a worker that was given up would keep its device, and its name, for half a minute."""
    policy = RestartPolicy(grace_seconds=0.05)
    hangs = replace(spec("decode-0", "hangs"), drain_seconds=1000.0)
    async with running([ROUTER], policy=policy) as (supervisor, watcher):
        supervisor.add(hangs)
        pid = (await watcher.wait_for("decode-0", ProcessState.STARTED))["pid"]
        await supervisor.retire("decode-0")
        assert not is_alive(pid)


async def test_a_process_is_retired_while_it_starts_and_while_it_waits_for_a_restart() -> None:
    policy = RestartPolicy(first_delay_seconds=1000.0, last_delay_seconds=1000.0, grace_seconds=20.0)
    async with running([ROUTER, spec("decode-0", needs=NEEDS)], policy=policy) as (supervisor, watcher):
        os.kill(supervisor.facts["decode-0"]["pid"], signal.SIGKILL)
        await watcher.wait_for("decode-0", ProcessState.ENDED)
        await supervisor.retire("decode-0")
        supervisor.add(spec("decode-1", "loads", needs=NEEDS))
        pid = (await watcher.wait_for("decode-1", ProcessState.STARTED))["pid"]
        all_ready = asyncio.create_task(supervisor.wait_ready())
        await supervisor.retire("decode-1")
        assert not is_alive(pid)
        assert list(await all_ready) == ["router"]


async def test_reconcile_starts_what_is_missing_retires_the_rest_and_leaves_others_alone(
    tmp_path: Path,
) -> None:
    ready_file = tmp_path / "ready.json"
    first = [ROUTER, spec("prefill-0", needs=NEEDS), spec("decode-0", needs=NEEDS)]
    async with running(first, ready_file) as (supervisor, _):
        before = supervisor.facts
        wanted = [spec("decode-1", needs=NEEDS), spec("decode-0", needs=NEEDS), ROUTER]
        await supervisor.reconcile(wanted)
        after = await supervisor.wait_ready()
        assert not is_alive(before["prefill-0"]["pid"])
        assert {name: after[name] for name in ("router", "decode-0")} == {
            name: before[name] for name in ("router", "decode-0")
        }
        assert names(ready_file) == ["router", "decode-0", "decode-1"]
        await supervisor.reconcile(wanted)
        assert supervisor.facts == after
        assert not supervisor.num_restarts


async def test_reconcile_ends_what_others_need_before_the_others() -> None:
    router = replace(spec("router", "drains"), drain_seconds=60.0)
    async with running([router, spec("decode-0", needs=NEEDS)]) as (supervisor, watcher):
        facts = supervisor.facts
        ended = asyncio.create_task(supervisor.reconcile([]))
        done, _ = await asyncio.wait({ended}, timeout=0.5)
        assert not done
        assert is_alive(facts["decode-0"]["pid"])
        os.kill(facts["router"]["pid"], signal.SIGTERM)
        await ended
        order = [watcher.events.get_nowait() for _ in range(watcher.events.qsize())][-2:]
        assert [(name, state) for name, state, _ in order] == [
            ("router", ProcessState.ENDED),
            ("decode-0", ProcessState.ENDED),
        ]


async def test_a_reused_name_starts_when_its_earlier_process_has_ended() -> None:
    """Two workers with one name would detach each other and compete for ports."""
    old = replace(spec("decode-0", "drains", needs=NEEDS), drain_seconds=60.0)
    async with running([ROUTER, old]) as (supervisor, watcher):
        pid = supervisor.facts["decode-0"]["pid"]
        await watcher.wait_for("decode-0", ProcessState.READY)
        retired = [asyncio.create_task(supervisor.reconcile([ROUTER])) for _ in range(2)]
        await asyncio.sleep(0)
        for wanted in ([ROUTER, spec("decode-0", needs=NEEDS)], [ROUTER]) * 2:
            retired.append(asyncio.create_task(supervisor.reconcile(wanted)))
            await asyncio.sleep(0)
        await supervisor.reconcile([ROUTER, spec("decode-0", needs=NEEDS)])
        await asyncio.sleep(0.2)
        assert watcher.events.empty()
        assert is_alive(pid)
        os.kill(pid, signal.SIGTERM)
        await asyncio.gather(*retired)
        facts = (await supervisor.wait_ready())["decode-0"]
        changes = [watcher.events.get_nowait()[:2] for _ in range(watcher.events.qsize())]
        assert changes == [("decode-0", state) for state in (ProcessState.ENDED, "started", "ready")]
        assert facts["pid"] != pid


async def test_a_stop_waits_for_retiring_processes_and_can_abort_their_drain() -> None:
    watcher, stopped, at_once = Watcher(), asyncio.Event(), asyncio.Event()
    drains = replace(spec("decode-0", "drains", needs=NEEDS), drain_seconds=60.0)
    supervisor = Supervisor([ROUTER, drains], policy=QUICK, listener=watcher)
    run = asyncio.create_task(supervisor.run(stopped, at_once))
    facts = await supervisor.wait_ready()
    retired = asyncio.create_task(supervisor.retire("decode-0"))
    await asyncio.sleep(0)
    stopped.set()
    done, _ = await asyncio.wait({run}, timeout=0.5)
    assert not done
    at_once.set()
    await asyncio.gather(run, retired)
    assert not any(is_alive(each["pid"]) for each in facts.values())
    for change in (supervisor.retire("router"), supervisor.reconcile([])):
        with pytest.raises(UnavailableError, match="supervisor is stopping"):
            await change
    with pytest.raises(UnavailableError, match="supervisor is stopping"):
        supervisor.add(spec("decode-1"))


async def test_a_change_that_contradicts_itself_is_refused_and_changes_nothing() -> None:
    worker = spec("decode-0", needs=NEEDS)
    async with running([ROUTER, worker]) as (supervisor, _):
        before = supervisor.facts
        with pytest.raises(SettingError, match="two processes have the same name"):
            supervisor.add(worker)
        with pytest.raises(SettingError, match="decode-1 needs prefill-0, which does not exist"):
            supervisor.add(spec("decode-1", needs=("prefill-0",)))
        with pytest.raises(
            SettingError, match="unknown process 'decode-1'; the processes are router, decode-0"
        ):
            await supervisor.retire("decode-1")
        with pytest.raises(SettingError, match="router cannot be retired: decode-0 needs it"):
            await supervisor.retire("router")
        with pytest.raises(SettingError, match="two processes have the same name"):
            await supervisor.reconcile([ROUTER, worker, worker])
        with pytest.raises(SettingError, match="decode-0 needs router"):
            await supervisor.reconcile([spec("decode-0"), spec("decode-1")])
        assert supervisor.facts == before
    with pytest.raises(SettingError, match="decode-0 needs router"):
        Supervisor([worker])
