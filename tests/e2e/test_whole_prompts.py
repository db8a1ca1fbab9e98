"""A service whose worker computes each prompt in one step: no client learns of a greater length."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from contract.identity import Role
from tests.checkpoints import make_checkpoint
from tests.e2e.in_process import running_in_process

pytestmark = pytest.mark.e2e

BUDGET = 32
"""Tokens of a step; the model has more positions."""


async def test_a_prompt_longer_than_a_step_is_refused_by_the_router(tmp_path: Path) -> None:
    """A28: with prefill-first it would be ignored by the engine. The length is that of /v1/models."""
    torch.set_num_threads(1)
    model = make_checkpoint(tmp_path / "model")
    policy: dict[str, Any] = {"scheduling_policy": "prefill-first", "max_num_batched_tokens": BUDGET}
    async with (
        running_in_process(tmp_path, model, [Role.AGGREGATED], "tcp", **policy) as service,
        aiohttp.ClientSession(f"http://{service.http}") as session,
    ):

        async def post(path: str, body: dict[str, Any]) -> tuple[int, Any]:
            async with session.post(path, json={"model": "model", **body}) as response:
                return response.status, await response.json()

        async with session.get("/v1/models") as response:
            assert [each["max_model_len"] for each in (await response.json())["data"]] == [BUDGET]
        long, longest = [5] * BUDGET, [5] * (BUDGET - 1)
        status, answer = await post("/v1/completions", {"prompt": long, "max_tokens": 1})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert f"maximum context length is {BUDGET} tokens" in answer["error"]["message"]
        assert (await post("/v1/completions", {"prompt": longest, "max_tokens": 1}))[0] == 200
        assert (await post("/v1/embeddings", {"input": long}))[0] == 200
        assert (await post("/v1/embeddings", {"input": [5] * (BUDGET + 1)}))[0] == 400
        (worker,) = service.workers
        counters = await worker.worker.engine.call("counters")
        assert (counters["requests_finished_total"], counters["requests_ignored_total"]) == (2, 0)
