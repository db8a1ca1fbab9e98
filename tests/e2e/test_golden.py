"""Golden: pools over each transport, mixed pools, one worker, the offline engine and transformers agree exactly."""

import asyncio
from pathlib import Path

import pytest

from protos import inference_pb2 as pb
from tests.e2e.prompts import golden_requests
from tests.e2e.references import offline_answers, transformers_answers
from tests.service import Answer, Service, counter, generate_all, running_service

AT_ONCE = 16
BLOCK_SIZE = 16
MOVED, NEEDED = "kvbaton_transfer_blocks_total", "kvbaton_transfer_needed_blocks_total"
FALLBACKS = "kvbaton_transfer_fallbacks_total"

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]


def token_ids(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


async def moved_and_needed(service: Service, transport: str) -> tuple[float, float]:
    metrics = await service.metrics("decode")
    return counter(metrics, MOVED, transport=transport), counter(metrics, NEEDED)


async def ask_pools(
    folder: Path, transport: str, alone: list[pb.GenerateRequest], together: list[pb.GenerateRequest]
) -> list[Answer]:
    """Ask 2 + 2 workers; exactly the missing blocks must have been sent over this transport."""
    pools = ("--prefill", "2", "--decode", "2", "--transport", transport)
    async with running_service(folder, *pools) as service:
        answers = await generate_all(service.grpc, alone, AT_ONCE)
        moved, needed = await moved_and_needed(service, transport)
        assert moved == needed == sum(-(-len(r.token_ids.ids) // BLOCK_SIZE) for r in alone)
        answers += await generate_all(service.grpc, together, AT_ONCE)
        moved_then, needed_then = await moved_and_needed(service, transport)
        assert moved_then == needed_then
        assert moved_then - moved < sum(-(-len(r.token_ids.ids) // BLOCK_SIZE) for r in together)
        assert counter(await service.metrics("decode"), FALLBACKS) == 0
    return answers


async def ask_others(folder: Path, requests: list[pb.GenerateRequest], *arguments: str) -> list[Answer]:
    async with running_service(folder, *arguments) as service:
        return await generate_all(service.grpc, requests, AT_ONCE)


def ask_every_way(folder: Path) -> tuple[list[pb.GenerateRequest], dict[str, list[Answer]]]:
    """Return the requests, and their answers by form of service."""
    alone, together = golden_requests()
    requests = alone + together
    answers: dict[str, list[Answer]] = {}
    for name in ("tcp", "shm", "aggregated", "mixed"):
        (folder / name).mkdir()
    for transport in ("tcp", "shm"):
        answers[transport] = asyncio.run(ask_pools(folder / transport, transport, alone, together))
    answers["aggregated"] = asyncio.run(ask_others(folder / "aggregated", requests, "--both", "1"))
    mixed = ("--prefill", "2", "--decode", "2", "--both", "1")
    answers["mixed"] = asyncio.run(ask_others(folder / "mixed", requests, *mixed))
    return requests, answers


def test_every_form_of_service_gives_the_same_tokens(tmp_path: Path, demo_model: Path) -> None:
    """64 prompts of 1 to 1,500 tokens, 16 at once: pools over tcp = shm = mixed = one = offline = transformers."""
    requests, answers = ask_every_way(tmp_path)
    assert len(requests) == 64
    offline = asyncio.run(offline_answers(demo_model, requests))
    for name, given in answers.items():
        assert token_ids(given) == offline, name
    for index, reference in transformers_answers(demo_model, requests).items():
        assert offline[index] == reference, f"prompt {index} differs from transformers"
    for request, answer in zip(requests, answers["tcp"], strict=True):
        assert len(answer.token_ids) == request.sampling.max_tokens
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(request.token_ids.ids)
