"""SIGTERM to a router with running streams: they end whole or with one clear error; the router ends by itself."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.clients import CONNECTION, Answer, Api
from tests.chaos.fleet import ROUTER
from tests.chaos.settings import chaos_rng
from tests.chaos.under_fault import DEADLINE, Scene, running_scene, until_streaming

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(240)]
WORKERS: dict[str, dict[str, Any]] = {"both-0": {}}


async def stopped_while_streaming(scene: Scene) -> tuple[int, list[Answer]]:
    """Stop the router in the middle of six answers; return its exit code and the answers."""
    longest = sorted(scene.references, key=lambda each: -len(each.text))[:3]
    asking = [
        asyncio.create_task(
            scene.client.ask(reference.question, api, timeout_seconds=DEADLINE, salt=f"{number}.{api}")
        )
        for number, reference in enumerate(longest)
        for api in (Api.HTTP_STREAM, Api.GRPC)
    ]
    await until_streaming(scene.fleet)
    code = await scene.fleet.children[ROUTER].stop(60.0)
    return code, await asyncio.gather(*asking)


async def test_running_answers_end_whole_or_with_one_error(tmp_path: Path) -> None:
    """P10: they used to be cut after a second. After the deadline: an error event or UNAVAILABLE, no broken connection."""
    async with running_scene(tmp_path, chaos_rng("drain"), WORKERS) as scene:
        code, answers = await stopped_while_streaming(scene)
        assert code == 0
        assert [answer.error for answer in answers if not answer.is_whole] == []

        scene.fleet.flags[ROUTER]["drain_seconds"] = 0
        await scene.fleet.restart(ROUTER)
        await scene.fleet.until_serving()
        await scene.client.until_connected()
        code, answers = await stopped_while_streaming(scene)
        assert code == 0
        cut = [answer for answer in answers if not answer.is_whole]
        assert cut
        assert {answer.error_kind for answer in cut} == {"unavailable"}, [answer.error for answer in cut]
        assert CONNECTION not in {answer.error_kind for answer in cut}
