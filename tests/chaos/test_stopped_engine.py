"""Only the engine process is stopped while its worker's service lives: it is detected and started again."""

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest

from tests.chaos.settings import chaos_rng
from tests.chaos.under_fault import PEER_TIMEOUT, Scene, running_scene

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(240)]


@pytest.mark.parametrize(("name", "num_decode"), [("prefill-0", 1), ("decode-0", 1), ("decode-0", 2)])
async def test_a_stopped_engine_is_detected_and_replaced(tmp_path: Path, name: str, num_decode: int) -> None:
    """P4: in 1 + 1 and 1 + 2, for either role; no answer is wrong or lost, the worker's process ends by itself."""
    rng = chaos_rng(f"stopped engine of {name} of {num_decode}")
    workers = ["prefill-0", *(f"decode-{number}" for number in range(num_decode))]
    async with running_scene(tmp_path, rng, {worker: {} for worker in workers}) as scene:
        outcome = await scene.during(lambda: stop_engine_until_replaced(scene, name))
        assert (outcome.wrong, outcome.errors) == ([], [])
        assert outcome.num_whole > 0
        await scene.until_calm(len(workers))


async def stop_engine_until_replaced(scene: Scene, name: str) -> None:
    states = await scene.fleet.states()
    engine, admin = states[name]["engine_process"]["pid"], scene.fleet.facts[name]["admin"]
    assert await health_of(admin) == 200
    os.kill(engine, signal.SIGSTOP)
    async with asyncio.timeout(20 * PEER_TIMEOUT):
        while await health_of(admin) == 200:
            await asyncio.sleep(PEER_TIMEOUT / 50)
        await scene.fleet.children[name].wait()
    await scene.fleet.restart(name)


async def health_of(admin: str) -> int | None:
    """Return the status of a process's /health; None if no process listens there."""
    try:
        async with aiohttp.ClientSession() as session, session.get(f"http://{admin}/health") as response:
            return response.status
    except aiohttp.ClientError:
        return None
