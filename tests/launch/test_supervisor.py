"""The supervisor with real child processes."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from contract.errors import SettingError, UnavailableError
from contract.identity import Role
from launch.kept_process import ProcessSpec, ProcessState, RestartPolicy
from launch.supervisor import Supervisor
from tests.launch.children import spec, wait_gone
from tests.launch.supervision import QUICK, Watcher, read, running


def is_empty(folder: Path) -> bool:
    return not list(folder.iterdir())


async def test_the_ready_file_names_every_process_and_is_removed_after_the_stop(tmp_path: Path) -> None:
    ready_file = tmp_path / "ready.json"
    specs = [spec("router"), spec("prefill-0", needs=("router",)), spec("decode-0", needs=("router",))]
    async with running(specs, ready_file) as (supervisor, _):
        facts = supervisor.facts
        content = read(ready_file)
        assert (content["http"], content["grpc"]) == ("127.0.0.1:1", "127.0.0.1:2")
        assert content["processes"] == [
            {
                "name": name,
                "role": role,
                "pid": facts[name]["pid"],
                "admin": f"127.0.0.1:{facts[name]['pid']}",
            }
            | ({"http": "127.0.0.1:1", "grpc": "127.0.0.1:2"} if role == "router" else {})
            for name, role in (("router", "router"), ("prefill-0", "prefill"), ("decode-0", "decode"))
        ]
    assert is_empty(tmp_path)
    assert all(wait_gone(process["pid"]) for process in content["processes"])


async def test_a_worker_gets_the_facts_of_what_it_needs() -> None:
    async with running(
        [spec("router"), spec("both-0", needs=("router",), note=lambda known: known["router"]["http"])]
    ) as (supervisor, _):
        assert supervisor.facts["both-0"]["note"] == "127.0.0.1:1"


async def test_a_killed_worker_is_restarted_and_the_ready_file_is_updated(tmp_path: Path) -> None:
    ready_file = tmp_path / "ready.json"
    specs = [spec("router"), spec("decode-0", needs=("router",))]
    async with running(specs, ready_file) as (supervisor, watcher):
        first = supervisor.facts["decode-0"]["pid"]
        await watcher.wait_for("decode-0", ProcessState.READY)
        os.kill(first, signal.SIGKILL)
        await watcher.wait_for("decode-0", ProcessState.ENDED)
        assert [process["name"] for process in read(ready_file)["processes"]] == ["router"]
        again = await watcher.wait_for("decode-0", ProcessState.READY)
        assert again["pid"] != first
        assert [process["pid"] for process in read(ready_file)["processes"]] == [
            supervisor.facts["router"]["pid"],
            again["pid"],
        ]
        assert supervisor.num_restarts == {"decode-0": 1}


async def test_a_restarted_router_gets_its_earlier_addresses() -> None:
    specs = [spec("router", note=lambda known: known["router"]["http"] if known else "first")]
    async with running(specs) as (supervisor, watcher):
        assert (await watcher.wait_for("router", ProcessState.READY))["note"] == "first"
        os.kill(supervisor.facts["router"]["pid"], signal.SIGKILL)
        assert (await watcher.wait_for("router", ProcessState.READY))["note"] == "127.0.0.1:1"


async def test_a_worker_that_keeps_failing_is_retried() -> None:
    lives = iter(["well", "fails", "fails", "well"])
    async with running([spec("both-0", lambda _: next(lives))]) as (supervisor, watcher):
        await watcher.wait_for("both-0", ProcessState.READY)
        os.kill(supervisor.facts["both-0"]["pid"], signal.SIGKILL)
        await watcher.wait_for("both-0", ProcessState.READY)
        assert supervisor.num_restarts == {"both-0": 3}


async def test_a_failed_restart_is_retried() -> None:
    """No memory for a fork, no descriptor for a pipe: the other processes keep running."""
    command = spec("both-0").command
    lives = iter([command, lambda _: ["/no/such/program"], command])
    specs = [ProcessSpec("both-0", Role.AGGREGATED, lambda known: next(lives)(known))]
    async with running(specs) as (supervisor, watcher):
        await watcher.wait_for("both-0", ProcessState.READY)
        os.kill(supervisor.facts["both-0"]["pid"], signal.SIGKILL)
        await watcher.wait_for("both-0", ProcessState.READY)
        assert supervisor.num_restarts == {"both-0": 2}


async def test_a_missing_program_ends_the_supervisor_and_is_named() -> None:
    specs = [ProcessSpec("both-0", Role.AGGREGATED, lambda _: ["/no/such/program"])]
    with pytest.raises(UnavailableError, match=r"both-0 could not start.*/no/such/program"):
        await Supervisor(specs, policy=QUICK).run(asyncio.Event())


async def test_the_group_of_a_dead_process_is_killed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its id may belong to another group by the time the supervisor stops."""
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _signal: killed.append(group))
    policy = RestartPolicy(first_delay_seconds=1000.0, last_delay_seconds=1000.0)
    async with running([spec("both-0")], policy=policy) as (supervisor, watcher):
        pid = supervisor.facts["both-0"]["pid"]
        os.kill(pid, signal.SIGKILL)
        await watcher.wait_for("both-0", ProcessState.ENDED)
    assert killed == [pid]


async def test_a_process_that_was_never_ready_ends_the_supervisor(tmp_path: Path) -> None:
    watcher = Watcher()
    supervisor = Supervisor(
        [spec("router"), spec("decode-0", "fails", needs=("router",))],
        ready_file=tmp_path / "ready.json",
        policy=QUICK,
        listener=watcher,
    )
    with pytest.raises(UnavailableError, match=r"decode-0 could not start.*exit code 3"):
        await supervisor.run(asyncio.Event())
    router = await watcher.wait_for("router", ProcessState.STARTED)
    assert wait_gone(router["pid"])
    assert is_empty(tmp_path)


async def test_a_stop_before_anything_is_ready_leaves_no_process() -> None:
    watcher, stopped = Watcher(), asyncio.Event()
    run = asyncio.create_task(Supervisor([spec("router")], policy=QUICK, listener=watcher).run(stopped))
    router = await watcher.wait_for("router", ProcessState.STARTED)
    stopped.set()
    await run
    assert wait_gone(router["pid"])


async def test_a_process_that_ignores_sigterm_is_killed() -> None:
    policy = RestartPolicy(grace_seconds=0.05)
    async with running([spec("both-0", "stubborn")], policy=policy) as (supervisor, _):
        pid = supervisor.facts["both-0"]["pid"]
    assert wait_gone(pid)


async def test_the_children_of_a_dead_child_are_killed_too() -> None:
    async with running([spec("both-0", "parent")]) as (supervisor, watcher):
        facts = supervisor.facts["both-0"]
        os.kill(facts["pid"], signal.SIGKILL)
        await watcher.wait_for("both-0", ProcessState.ENDED)
        assert wait_gone(int(facts["grandchild"]))


async def test_a_child_leads_a_group_within_the_session_and_may_write_to_its_terminal() -> None:
    """Linux may weigh sessions against each other: threads that waited for each other were held up for a second."""
    async with running([spec("both-0")]) as (supervisor, _):
        pid = supervisor.facts["both-0"]["pid"]
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpgid(pid) == pid
        (ignored,) = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        assert int(ignored, 16) >> signal.SIGTTOU - 1 & 1, "`stty tostop` would stop it"


def start_supervisor(ready_file: Path) -> tuple[subprocess.Popen[str], list[int]]:
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.launch.supervisor_program", str(ready_file)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    return program, [process["pid"] for process in read(ready_file)["processes"]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_everything_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    ready_file = tmp_path / "ready.json"
    program, pids = start_supervisor(ready_file)
    with program:
        program.send_signal(number)
        assert program.wait() == 0
    assert not ready_file.exists()
    assert all(wait_gone(pid) for pid in pids)


def test_no_child_survives_a_killed_supervisor(tmp_path: Path) -> None:
    program, pids = start_supervisor(tmp_path / "ready.json")
    with program:
        program.kill()
        program.wait()
    assert len(pids) == 2
    assert all(wait_gone(pid) for pid in pids)


def test_delays_double_up_to_their_limit() -> None:
    policy = RestartPolicy(first_delay_seconds=0.5, last_delay_seconds=3.0)
    assert [policy.delay(failures) for failures in (1, 2, 3, 4, 1000)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_no_two_processes_have_one_name() -> None:
    """Costly choice: workers are attached by name, so two with one name would detach each other."""
    with pytest.raises(SettingError, match="two processes have the same name"):
        Supervisor([spec("prefill-0"), spec("prefill-0")])


async def test_workers_are_stopped_when_the_router_has_drained_and_a_second_signal_is_passed_on() -> None:
    """P10: the router gets its drain time in addition to the grace; the workers run until it has ended."""
    watcher, stopped, at_once = Watcher(), asyncio.Event(), asyncio.Event()
    router = replace(spec("router", "drains"), drain_seconds=60.0)
    policy = RestartPolicy(first_delay_seconds=0.01, grace_seconds=0.3)
    workers = [spec("decode-0", needs=("router",))]
    supervisor = Supervisor([router, *workers], policy=policy, listener=watcher)
    run = asyncio.create_task(supervisor.run(stopped, at_once))
    facts = await supervisor.wait_ready()
    stopped.set()
    done, _ = await asyncio.wait({run}, timeout=1.0)  # longer than the grace
    assert not done
    os.kill(facts["decode-0"]["pid"], 0)  # it lives, or this raises
    at_once.set()
    await run
    assert all(wait_gone(each["pid"]) for each in facts.values())
