"""The control link between the only two workers fails while both live: requests are served without it, later with it."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.clients import Api
from tests.chaos.fleet import ROUTER
from tests.chaos.settings import chaos_rng
from tests.chaos.test_links import until_bytes
from tests.chaos.under_fault import DEADLINE, scene_behind_a_link

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(240)]


@pytest.mark.parametrize("how", ["refused", "dropped"])
async def test_every_request_is_answered_without_a_control_link(tmp_path: Path, how: str) -> None:
    """P6: 0 of 6 were answered; now the decode worker computes the prompts, and KV is sent again after the link is back."""
    rng = chaos_rng(f"severed, {how}")
    async with scene_behind_a_link(tmp_path, rng) as (scene, link):
        if how == "refused":
            link.control.is_refusing = True
            link.control.cut()
        else:
            link.control.hold()
        for number, reference in enumerate(scene.references[:6]):
            answer = await scene.client.ask(
                reference.question, Api.HTTP_STREAM, timeout_seconds=DEADLINE, salt=f"cut.{number}"
            )
            assert answer.is_whole, answer.error
        states = await scene.fleet.states()
        assert not any(states[ROUTER]["requests"].values())
        if how == "refused":
            link.control.is_refusing = False
        else:
            link.control.release()
        back = asyncio.create_task(until_bytes(link))
        for turn in range(600):
            if back.done():
                break
            reference = scene.references[turn % len(scene.references)]
            await scene.client.ask(
                reference.question, Api.GRPC, timeout_seconds=DEADLINE, salt=f"back.{turn}"
            )
        await back
        await scene.until_calm(2)
