"""B2: a prefill and a decode worker that share no transport: their router learns it with the first request."""

from pathlib import Path

import aiohttp
import pytest

from contract.identity import Role
from tests.e2e.in_process import running_in_process

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(180)]


async def test_prompts_are_computed_once_although_nothing_can_be_handed_over(
    tmp_path: Path, demo_model: Path
) -> None:
    """Before, each prompt was computed three times, for ever, while everything looked healthy."""
    roles = [Role.PREFILL, Role.DECODE]
    transports = {Role.PREFILL: "shm", Role.DECODE: "tcp"}
    async with (
        running_in_process(tmp_path, demo_model, roles, transports) as service,  # type: ignore[arg-type]
        aiohttp.ClientSession(f"http://{service.http}") as session,
    ):
        for number in range(4):
            body = {"prompt": f"The old moose {number}", "max_tokens": 4}
            async with session.post("/v1/completions", json=body) as response:
                assert response.status == 200
        async with session.get("/health") as response:
            assert (response.status, (await response.json())["status"]) == (200, "degraded")
        async with session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        counts = dict(line.rsplit(" ", 1) for line in lines if line.startswith("kvbaton_"))
        assert float(counts['kvbaton_failed_pairs{kind="incompatible"}']) == 1
        assert float(counts['kvbaton_recomputed_prompts_total{reason="local"}']) == 4
        assert float(counts['kvbaton_recomputed_prompts_total{reason="replay"}']) == 0
        assert float(counts['kvbaton_request_replays_total{kind="incompatible"}']) == 1
