"""The link between a prefill and a decode worker fails in every way: right tokens or one clear error."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.chaos.proxy import FaultyLink
from tests.chaos.settings import chaos_rng
from tests.chaos.under_fault import LEASE, PEER_TIMEOUT, Scene, scene_behind_a_link

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(240)]


async def test_answers_are_right_under_every_fault_of_the_link(tmp_path: Path) -> None:
    """Cut, black hole (shorter than a peer's timeout, longer, longer than a lease), slow, garbled; one after another."""
    rng = chaos_rng("links")
    async with scene_behind_a_link(tmp_path, rng) as (scene, link):
        for fault in (cut_again_and_again, hold_briefly, hold_long, hold_the_data, slow_down, garble):
            pulled_before = await scene.fleet.num_pulled_again("decode-0")
            outcome = await scene.during(lambda fault=fault: fault(scene, link))  # type: ignore[misc]
            num_healed = outcome.num_replays + await scene.fleet.num_pulled_again("decode-0") - pulled_before
            assert (outcome.wrong, outcome.errors) == ([], []), fault.__name__
            assert outcome.num_whole >= 6
            assert num_healed > 0 or fault in (hold_briefly, hold_the_data, slow_down), fault.__name__
            await scene.until_calm(2)
        assert link.data.num_flips > 0


Fault = Callable[[Scene, FaultyLink], Awaitable[None]]


async def cut_again_and_again(scene: Scene, link: FaultyLink) -> None:
    for _ in range(5):
        await until_bytes(link)
        link.cut()


async def hold_briefly(scene: Scene, link: FaultyLink) -> None:
    await hold(link, PEER_TIMEOUT / 3)


async def hold_long(scene: Scene, link: FaultyLink) -> None:
    await hold(link, LEASE + PEER_TIMEOUT)


async def hold(link: FaultyLink, seconds: float) -> None:
    await until_bytes(link)
    link.hold()
    try:
        await asyncio.sleep(seconds)
    finally:
        link.release()


async def hold_the_data(scene: Scene, link: FaultyLink) -> None:
    """Pings pass between the peers, but no byte of KV."""
    await until_bytes(link)
    link.data.is_open.clear()
    try:
        await asyncio.sleep(LEASE + PEER_TIMEOUT)
    finally:
        link.data.is_open.set()


async def slow_down(scene: Scene, link: FaultyLink) -> None:
    link.data.delay_seconds = 0.05
    link.control.delay_seconds = 0.05
    await until_bytes(link)
    await asyncio.sleep(2 * PEER_TIMEOUT)
    link.data.delay_seconds = link.control.delay_seconds = 0.0


async def garble(scene: Scene, link: FaultyLink) -> None:
    """Flip one bit each time, somewhere in the stream of blocks."""
    for _ in range(4):
        link.data.flip_after_bytes = scene.rng.randrange(20_000)
        async with asyncio.timeout(60):
            while link.data.flip_after_bytes is not None:
                await until_bytes(link)


async def until_bytes(link: FaultyLink) -> None:
    """Wait until the next bytes of KV cross the link."""
    link.data.moved.clear()
    async with asyncio.timeout(60):
        await link.data.moved.wait()
