"""B16: after the caches of a service of real engines were dropped, the next prompt is computed as a whole."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from contract.identity import Role
from tests.e2e.in_process import LocalService, running_in_process

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

PROMPT = {"prompt": "The old moose stood by the lake. " * 8, "temperature": 0}
LONG = {**PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True}


async def num_cached(session: aiohttp.ClientSession) -> int:
    """Ask, and return how many tokens of the prompt were cached."""
    async with session.post("/v1/completions", json={**PROMPT, "max_tokens": 2}) as response:
        assert response.status == 200
        details = (await response.json())["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0


async def until_free(service: LocalService) -> None:
    """Wait until no engine holds a block."""
    await asyncio.gather(*(each.worker.engine.until_free() for each in service.workers))


async def test_an_operator_drops_the_prefix_caches_of_a_service(tmp_path: Path, demo_model: Path) -> None:
    async with (
        running_in_process(tmp_path, demo_model, [Role.PREFILL, Role.DECODE], "shm") as service,
        aiohttp.ClientSession(f"http://{service.http}") as session,
    ):
        url = f"http://{service.router.addresses.admin}/admin/reset_prefix_cache"
        assert await num_cached(session) == 0
        assert await num_cached(session) > 0

        async with session.post("/v1/completions", json=LONG) as stream:
            for _ in range(20):  # so far that the decode worker has the KV
                await stream.content.readline()
            async with session.post(url) as response:
                answer = await response.json()
                assert response.status == 409
            refused = {each["id"]: each["reason"] for each in answer["refused"]}
            assert "hold blocks" in refused["decode-1"]

        await num_cached(session)
        assert await num_cached(session) > 0
        await until_free(service)
        async with session.post(url) as response:
            assert (response.status, await response.json()) == (200, {"workers": ["prefill-0", "decode-1"]})
        assert await num_cached(session) == 0
        assert await num_cached(session) > 0
