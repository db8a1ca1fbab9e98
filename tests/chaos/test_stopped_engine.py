"""Only the engine process is stopped while its worker's service lives: it is detected and started again."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from contract.identity import Role
from tests.chaos.settings import chaos_rng
from tests.chaos.under_fault import PEER_TIMEOUT, TIMES, Scene, running_scene

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(240)]


async def test_a_stopped_engine_is_detected_and_replaced(tmp_path: Path) -> None:
    """P4: in 1 + 1 and 1 + 2, for either role; no answer is wrong or lost, the worker's process ends by itself."""
    pair: dict[str, dict[str, Any]] = {"prefill-0": {}, "decode-0": {}}
    async with running_scene(tmp_path, chaos_rng("stopped engine"), pair) as scene:
        await check_that_it_is_replaced(scene, "prefill-0", 2)
        await check_that_it_is_replaced(scene, "decode-0", 2)
        await scene.fleet.start_worker("decode-1", Role.DECODE, **TIMES)
        await check_that_it_is_replaced(scene, "decode-0", 3)


async def check_that_it_is_replaced(scene: Scene, name: str, num_workers: int) -> None:
    outcome = await scene.during(lambda: stop_engine_until_replaced(scene, name))
    assert (outcome.wrong, outcome.errors) == ([], []), (name, num_workers)
    assert outcome.num_whole > 0
    await scene.until_calm(num_workers)


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
