"""Workers that are stopped or drained under load: no request fails, and no token changes.

One pool serves all tests of this file: each leaves every worker serving and nothing held. A pool with another model serves
those that start no process again.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from contract.identity import Role
from tests.chaos.models import DEMO, RECURRENT, WINDOWS
from tests.chaos.settings import chaos_rng, has_seed
from tests.chaos.under_fault import TIMES, Outcome, Scene, running_scene, until_streaming

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]
NEVER = 100.0
POOL: dict[str, dict[str, Any]] = {
    "prefill-0": {"drain_seconds": NEVER},
    "decode-0": {"drain_seconds": NEVER},
    "prefill-1": {"drain_seconds": 0.0},
    "decode-1": {"drain_seconds": 0.0},
}
"""One worker of each role lets its legs end, the other one gives them up at once."""
EACH_MODEL = pytest.mark.parametrize(
    "pool",
    [DEMO, RECURRENT, *([WINDOWS] if has_seed() else [])],
    indirect=True,
    scope="module",
    ids=lambda model: model.name,
)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[DEMO], ids=lambda model: model.name)
async def pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Scene]:
    rng = chaos_rng("drains")
    async with running_scene(tmp_path_factory.mktemp("pool"), rng, POOL, request.param) as scene:
        yield scene


@pytest_asyncio.fixture(loop_scope="module")
async def scene(pool: Scene) -> AsyncIterator[Scene]:
    """The pool, which is as it was at the end of the test."""
    yield pool
    await pool.until_calm(len(POOL))


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
async def test_a_stopped_worker_lets_its_legs_end(scene: Scene, name: str) -> None:
    """It leaves when it is empty, long before its deadline, and the leases of a prefill worker are read."""
    codes: list[int] = []
    before = await scene.fleet.drains()

    async def stop() -> None:
        codes.extend(await stopped_and_restarted(scene, name))

    began = time.monotonic()
    nothing_failed(await scene.during(stop))
    assert codes == [0]
    assert time.monotonic() - began < NEVER
    assert await scene.fleet.drains() == before | {"empty": before.get("empty", 0) + 1}


@pytest.mark.parametrize("name", ["prefill-1", "decode-1"])
async def test_what_is_left_at_the_deadline_continues_on_other_workers(scene: Scene, name: str) -> None:
    """Two answers at most are moved at once, so others are left of several."""
    codes: list[int] = []

    async def stop() -> None:
        codes.extend(await stopped_and_restarted(scene, name, num_legs=4 if name == "decode-1" else 1))

    outcome = await scene.during(stop, num_streams=12)
    nothing_failed(outcome)
    assert codes == [0]
    assert name == "prefill-1" or outcome.num_replays


async def test_two_workers_are_stopped_at_once(scene: Scene) -> None:
    """One of each role, of which the other one continues alone."""

    async def stop() -> None:
        assert await stopped_and_restarted(scene, "prefill-0", "decode-1") == [0, 0]

    nothing_failed(await scene.during(stop, num_streams=12))


async def test_a_second_signal_ends_a_worker_at_once_and_no_request_fails(scene: Scene) -> None:
    async def stop() -> None:
        await until_busy(scene, "decode-0")
        began = time.monotonic()
        assert await scene.fleet.terminate("decode-0", is_twice=True) == 0
        assert time.monotonic() - began < 10
        await scene.fleet.restart("decode-0")

    nothing_failed(await scene.during(stop, num_streams=12))


@EACH_MODEL
async def test_a_drain_by_the_router_is_undone_and_done_again(scene: Scene) -> None:
    """The worker stays in its process, serves again, and drains to its end."""
    before = Counter(await scene.fleet.drains())

    async def drain() -> None:
        await until_busy(scene, "decode-0")
        status, facts = await scene.fleet.order("decode-0", "drain")
        assert (status, facts["state"]) == (202, "draining")
        assert await scene.fleet.attached() == set(POOL) - {"decode-0"}
        status, facts = await scene.fleet.order("decode-0", "undrain")
        assert (status, facts["state"]) == (200, "serving")
        await until_busy(scene, "decode-0")
        status, facts = await scene.fleet.order("decode-0", "drain?deadline=0.5&wait=60")
        assert (status, facts["state"], facts["num_legs"]) == (200, "empty", 0)
        assert (await scene.fleet.order("decode-0", "undrain"))[0] == 200

    nothing_failed(await scene.during(drain))
    ended = Counter(await scene.fleet.drains()) - before
    # A worker whose answers have all ended when its drain is undone was counted as empty.
    assert ended.total() == 2 and (ended["undone"] == 1 or ended["empty"]), ended


async def test_a_worker_of_each_role_is_restarted_one_after_the_other(scene: Scene) -> None:
    """A rolling restart, of an aggregated worker too."""
    await scene.fleet.start_worker("both-0", Role.AGGREGATED, drain_seconds=0.0, **TIMES)

    async def restart_all() -> None:
        for name in ("prefill-0", "decode-1", "both-0"):
            assert await stopped_and_restarted(scene, name) == [0]

    nothing_failed(await scene.during(restart_all))
    assert await scene.fleet.terminate("both-0") == 0
    del scene.fleet.facts["both-0"]


@EACH_MODEL
async def test_workers_change_their_roles_and_back(scene: Scene) -> None:
    """Their processes stay, their answers move or end, and a role is never left without a worker."""
    pids = {name: scene.fleet.children[name].pid for name in POOL}

    async def flip() -> None:
        for name, role in (
            ("decode-1", "prefill"),
            ("decode-1", "decode"),
            ("prefill-1", "decode"),
            ("prefill-1", "prefill"),
        ):
            await until_streaming(scene.fleet)
            status, facts = await scene.fleet.order(name, f"flip?role={role}&wait=60")
            assert (status, facts["role"], facts["state"]) == (200, role, "serving")
            await until_busy(scene, name)

    nothing_failed(await scene.during(flip))
    assert {name: scene.fleet.children[name].pid for name in POOL} == pids
