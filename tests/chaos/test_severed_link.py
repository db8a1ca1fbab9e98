"""The control link between the only two workers fails while both live: requests are served without it, later with it."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.clients import Api
from tests.chaos.fleet import ROUTER
from tests.chaos.proxy import FaultyLink, every, none
from tests.chaos.settings import chaos_rng
from tests.chaos.test_links import until_bytes
from tests.chaos.under_fault import DEADLINE, Scene, scene_behind_a_link

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(240)]
APIS = (Api.HTTP_STREAM, Api.GRPC)


async def test_every_request_is_answered_without_a_control_link(tmp_path: Path) -> None:
    """P6: 0 of 6 were answered; now the decode worker computes the prompts, and KV is sent again after the link is back.

    Its connections are refused, then they are dropped.
    """
    async with scene_behind_a_link(tmp_path, chaos_rng("severed link")) as (scene, link):
        link.control.refuses = every
        link.control.cut()
        await check_that_all_are_answered(scene, "refused")
        link.control.refuses = none
        await check_that_it_is_back(scene, link, "refused")
        link.control.hold()
        await check_that_all_are_answered(scene, "dropped")
        link.control.release()
        await check_that_it_is_back(scene, link, "dropped")


async def check_that_all_are_answered(scene: Scene, how: str) -> None:
    for number, reference in enumerate(scene.references[:6]):
        answer = await scene.client.ask(
            reference.question, APIS[number % 2], timeout_seconds=DEADLINE, salt=f"{how}.{number}"
        )
        assert answer.is_whole, (how, answer.error)
    states = await scene.fleet.states()
    assert not any(states[ROUTER]["requests"].values())


async def check_that_it_is_back(scene: Scene, link: FaultyLink, how: str) -> None:
    back = asyncio.create_task(until_bytes(link))
    for turn in range(600):
        if back.done():
            break
        reference = scene.references[turn % len(scene.references)]
        await scene.client.ask(
            reference.question, Api.GRPC, timeout_seconds=DEADLINE, salt=f"{how}, back.{turn}"
        )
    await back
    await scene.until_calm(2)
