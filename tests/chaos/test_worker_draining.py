"""Workers that are stopped or drained under load: no request fails, and no token changes."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.settings import chaos_rng
from tests.chaos.under_fault import Outcome, Scene, running_scene, until_streaming

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]
NEVER = 100.0
PAIRS: dict[str, dict[str, Any]] = {
    name: {"drain_seconds": NEVER} for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")
}


def brief(*names: str) -> dict[str, dict[str, Any]]:
    """Return the workers, of which the named ones give their legs up at once."""
    return {name: {"drain_seconds": 0.0 if name in names else NEVER} for name in PAIRS}


def nothing_failed(outcome: Outcome) -> None:
    assert (outcome.wrong, outcome.errors) == ([], [])
    assert outcome.num_whole


async def until_busy(scene: Scene, worker: str, num_legs: int = 1) -> None:
    """Wait until a worker has this many legs."""
    async with asyncio.timeout(30):
        while not (await scene.fleet.states())["router"]["requests"]["streaming"]:
            await asyncio.sleep(0.02)
        while (await scene.fleet.states())[worker]["num_accepted"] < num_legs:
            await asyncio.sleep(0.02)


async def stopped_and_restarted(scene: Scene, *names: str, num_legs: int = 1) -> list[int]:
    """Stop these workers at the same time while they have legs, start them again, and return their exit codes."""
    for name in names:
        await until_busy(scene, name, num_legs)
    codes = await asyncio.gather(*(scene.fleet.terminate(name) for name in names))
    await asyncio.gather(*(scene.fleet.restart(name) for name in names))
    return codes


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_a_stopped_worker_lets_its_legs_end(tmp_path: Path, name: str) -> None:
    """It leaves when it is empty, long before its deadline, and the leases of a prefill worker are read."""
    async with running_scene(tmp_path, chaos_rng("drain-worker"), PAIRS) as scene:
        codes: list[int] = []

        async def stop() -> None:
            codes.extend(await stopped_and_restarted(scene, name))

        began = time.monotonic()
        nothing_failed(await scene.during(stop))
        assert codes == [0]
        assert time.monotonic() - began < NEVER
        assert await scene.fleet.drains() == {"empty": 1}
        await scene.until_calm(len(PAIRS))


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_what_is_left_at_the_deadline_continues_on_other_workers(tmp_path: Path, name: str) -> None:
    """Two answers at most are moved at once, so others are left of several."""
    async with running_scene(tmp_path, chaos_rng("drain-deadline"), brief(name)) as scene:
        codes: list[int] = []

        async def stop() -> None:
            codes.extend(await stopped_and_restarted(scene, name, num_legs=4 if name == "decode-0" else 1))

        outcome = await scene.during(stop, num_streams=12)
        nothing_failed(outcome)
        assert codes == [0]
        assert name == "prefill-0" or outcome.num_replays
        await scene.until_calm(len(PAIRS))


async def test_two_workers_are_stopped_at_once(tmp_path: Path) -> None:
    """One of each role, of which the other one continues alone."""
    async with running_scene(tmp_path, chaos_rng("drain-two"), brief("decode-1")) as scene:

        async def stop() -> None:
            assert await stopped_and_restarted(scene, "prefill-0", "decode-1") == [0, 0]

        nothing_failed(await scene.during(stop, num_streams=12))
        await scene.until_calm(len(PAIRS))


async def test_a_second_signal_ends_a_worker_at_once_and_no_request_fails(tmp_path: Path) -> None:
    async with running_scene(tmp_path, chaos_rng("drain-twice"), PAIRS) as scene:

        async def stop() -> None:
            await until_busy(scene, "decode-0")
            began = time.monotonic()
            assert await scene.fleet.terminate("decode-0", is_twice=True) == 0
            assert time.monotonic() - began < 10
            await scene.fleet.restart("decode-0")

        nothing_failed(await scene.during(stop, num_streams=12))
        await scene.until_calm(len(PAIRS))


async def test_a_drain_by_the_router_is_undone_and_done_again(tmp_path: Path) -> None:
    """The worker stays in its process, serves again, and drains to its end."""
    async with running_scene(tmp_path, chaos_rng("drain-undone"), PAIRS) as scene:

        async def drain() -> None:
            await until_busy(scene, "decode-0")
            status, facts = await scene.fleet.order("decode-0", "drain")
            assert (status, facts["state"]) == (202, "draining")
            assert await scene.fleet.attached() == set(PAIRS) - {"decode-0"}
            status, facts = await scene.fleet.order("decode-0", "undrain")
            assert (status, facts["state"]) == (200, "serving")
            await until_busy(scene, "decode-0")
            status, facts = await scene.fleet.order("decode-0", "drain?deadline=0.5&wait=60")
            assert (status, facts["state"], facts["num_legs"]) == (200, "empty", 0)
            assert (await scene.fleet.order("decode-0", "undrain"))[0] == 200

        nothing_failed(await scene.during(drain))
        assert (await scene.fleet.drains())["undone"] == 1
        await scene.until_calm(len(PAIRS))


async def test_all_workers_are_restarted_one_after_the_other(tmp_path: Path) -> None:
    """A rolling restart, of an aggregated worker too."""
    workers = {**brief("prefill-1", "decode-1"), "both-0": {"drain_seconds": 0.0}}
    async with running_scene(tmp_path, chaos_rng("drain-rolling"), workers) as scene:

        async def restart_all() -> None:
            for name in workers:
                await until_busy(scene, name)
                assert await scene.fleet.terminate(name) == 0
                await scene.fleet.restart(name)

        nothing_failed(await scene.during(restart_all, num_streams=12))
        await scene.until_calm(len(workers))


async def test_workers_change_their_roles_and_back(tmp_path: Path) -> None:
    """Their processes stay, their answers move or end, and a role is never left without a worker."""
    async with running_scene(tmp_path, chaos_rng("flip"), brief(*PAIRS)) as scene:
        pids = {name: scene.fleet.children[name].pid for name in PAIRS}

        async def flip() -> None:
            for name, role in (("decode-1", "prefill"), ("decode-1", "decode"), ("prefill-1", "decode")):
                await until_streaming(scene.fleet)
                status, facts = await scene.fleet.order(name, f"flip?role={role}&wait=60")
                assert (status, facts["role"], facts["state"]) == (200, role, "serving")
                await until_busy(scene, name)

        nothing_failed(await scene.during(flip, num_streams=12))
        assert {name: scene.fleet.children[name].pid for name in PAIRS} == pids
        await scene.until_calm(len(PAIRS))
