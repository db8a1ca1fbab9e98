"""Drafts behind a whole service: what a client reads is the same, with stop strings, choices and both paths."""

from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
import torch

from contract.identity import Role
from tests.drafting_engines import copying_model
from tests.e2e.in_process import running_in_process

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("free_drafts")]

BODIES: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 60, "stop": ["mnoh"]},
    {"temperature": 0, "max_tokens": 60, "stop": ["zz", "jklm"], "include_stop_str_in_output": True},
    {"temperature": 1, "seed": 3, "n": 3, "max_tokens": 50, "logprobs": 1, "stop": ["omh"]},
    {"temperature": 1, "seed": 4, "best_of": 3, "n": 2, "max_tokens": 40},
    {"temperature": 0.5, "seed": 4, "max_tokens": 40, "structured_outputs": {"regex": "([h-o]{3}-){2,12}"}},
]
PROMPTS = ["hijklmnohijk", "some text hijklmno and hij"]


async def answers(folder: Path, model: Path, roles: list[Role], speculate: str) -> tuple[list[Any], float]:
    """Return what clients get (without times), and how many drafts were right."""
    found: list[Any] = []
    async with running_in_process(folder, model, roles, "tcp", speculate=speculate) as service:
        async with aiohttp.ClientSession() as session:
            for body in BODIES:
                whole = {"model": "model", "prompt": PROMPTS, "return_token_ids": True, **body}
                async with session.post(f"http://{service.http}/v1/completions", json=whole) as response:
                    answer = await response.json()
                    assert response.status == 200, answer
                    for choice in answer["choices"]:
                        # The last digits depend on the batch, and a step with drafts is another batch.
                        if lists := choice["logprobs"]:
                            values = [round(value, 3) for value in lists["token_logprobs"]]
                            choice["logprobs"] = (lists["tokens"], lists["text_offset"], values)
                    found.append((answer["choices"], answer["usage"]))
        name = "spec_decode_num_accepted_tokens_total"
        counted = [await cast(Any, one.worker).engine.call("counters") for one in service.workers]
        return found, sum(of_worker.get(name, 0) for of_worker in counted)


@pytest.mark.parametrize(
    "roles", [[Role.AGGREGATED], [Role.PREFILL, Role.DECODE]], ids=["one worker", "two workers"]
)
async def test_clients_read_the_same(tmp_path: Path, roles: list[Role]) -> None:
    torch.set_num_threads(1)
    model = copying_model(tmp_path / "model", torch.float32)
    found = {}
    for speculate in ("none", "ngram"):
        folder = tmp_path / speculate
        folder.mkdir()
        found[speculate] = await answers(folder, model, roles, speculate)
    assert found["ngram"][0] == found["none"][0]
    assert found["ngram"][1] > 50 and found["none"][1] == 0
    assert {choice["finish_reason"] for choices, _ in found["none"][0] for choice in choices} >= {
        "stop",
        "length",
    }
