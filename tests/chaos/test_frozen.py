"""Processes that are frozen and resumed, or killed and restarted: no token is repeated or wrong."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.fleet import ROUTER
from tests.chaos.settings import chaos_rng, drawn_transports
from tests.chaos.under_fault import LEASE, PEER_TIMEOUT, Scene, fixed_ports, running_scene, until_streaming

SHORT = PEER_TIMEOUT / 2
LONG = LEASE + 2 * PEER_TIMEOUT
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]


@pytest.mark.parametrize("transport", drawn_transports())
async def test_frozen_or_killed_workers_return_without_wrong_answers(tmp_path: Path, transport: str) -> None:
    """Frozen for less than the peers' timeout, and for longer than a lease; its requests were replayed elsewhere.

    The killed prefill worker returns on the same ports with another boot id and is not taken for the old one.
    """
    rng = chaos_rng(f"frozen over {transport}")
    flags = {name: {"transport": transport, **fixed_ports("127.0.0.1")} for name in NAMES}
    async with running_scene(tmp_path, rng, flags) as scene:
        for name in ("prefill-0", "decode-0"):
            for seconds in (SHORT, LONG):
                outcome = await scene.during(lambda n=name, s=seconds: freeze(scene, n, s))  # type: ignore[misc]
                assert (outcome.wrong, outcome.errors) == ([], []), (name, seconds)
                assert outcome.num_replays > 0 or (name, seconds) != ("decode-0", LONG)
                await scene.until_calm(4)
        outcome = await scene.during(lambda: restart(scene, "prefill-0"))
        assert (outcome.wrong, outcome.errors) == ([], [])
        await scene.until_calm(4)


async def test_a_killed_router_returns_and_serves_as_before(tmp_path: Path) -> None:
    """Its clients see the connection break; its workers free everything, register again and answer as before."""
    rng = chaos_rng("killed router")
    async with running_scene(tmp_path, rng, {name: {} for name in NAMES}) as scene:
        before = await scene.during(lambda: restart(scene, ROUTER), may_break=True)
        assert before.wrong == []
        assert before.errors != []
        await scene.until_calm(4)
        await scene.client.until_connected()
        after = await scene.during(lambda: until_streaming(scene.fleet))
        assert (after.wrong, after.errors) == ([], [])
        await scene.until_calm(4)


async def freeze(scene: Scene, name: str, seconds: float) -> None:
    scene.fleet.freeze(name)
    try:
        await asyncio.sleep(seconds)
    finally:
        scene.fleet.thaw(name)


async def restart(scene: Scene, name: str) -> None:
    await scene.fleet.kill(name)
    await scene.fleet.restart(name)
