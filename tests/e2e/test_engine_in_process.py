"""A service whose workers run their engines in threads answers like one whose engines have processes."""

from pathlib import Path
from typing import Any

import pytest

from tests.service import Service, running_service

BODIES: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 24},
    {"temperature": 0.8, "seed": 7, "n": 2, "max_tokens": 24},
    {"seed": 5, "max_tokens": 24, "structured_outputs": {"regex": "[a-z]{3,8} [0-9]{2,4}"}},
]
PROMPTS = ["The old moose sat near", "Once", "a b c d e f g h " * 20]


async def answers(service: Service) -> list[Any]:
    """Return the tokens of all answers."""
    found = []
    for body in BODIES:
        status, whole = await service.post(
            "/v1/completions", {"prompt": PROMPTS, "return_token_ids": True, **body}
        )
        assert status == 200, whole
        found.append([choice["token_ids"] for choice in whole["choices"]])
    return found


async def engines_beside(service: Service) -> list[bool]:
    """Return True for each worker whose engine is a process of its own."""
    workers = [process for process in service.processes if process["role"] != "router"]
    states = [await service.state_of(worker["admin"]) for worker in workers]
    return [
        state["engine_process"]["pid"] != worker["pid"] for state, worker in zip(states, workers, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.e2e
async def test_both_places_of_the_engine_give_the_same_tokens(tmp_path: Path) -> None:
    """A5, A40: over HTTP, and through the hand-over; SIGTERM ends both."""
    found = {}
    for place in ("process", "in-process"):
        folder = tmp_path / place
        folder.mkdir()
        pools = ("--prefill", "1", "--decode", "1", "--num-threads", "1")
        async with running_service(folder, *pools, "--engine", place) as service:
            found[place] = await answers(service)
            assert await engines_beside(service) == [place == "process"] * 2
        assert service.process.returncode == 0
    assert found["process"] == found["in-process"]
