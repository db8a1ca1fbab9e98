"""Golden: the hand-over over tcp, one aggregated worker, the offline engine and transformers agree token by token."""

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

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def token_ids(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


async def moved_and_needed(service: Service) -> tuple[float, float]:
    metrics = await service.metrics("decode")
    return counter(metrics, MOVED, transport="tcp"), counter(metrics, NEEDED)


async def ask_pools(
    folder: Path, alone: list[pb.GenerateRequest], together: list[pb.GenerateRequest]
) -> list[Answer]:
    """Ask 2 + 2 workers; on the way, exactly the missing blocks must have crossed over tcp."""
    async with running_service(folder, "--prefill", "2", "--decode", "2", "--transport", "tcp") as service:
        answers = await generate_all(service.grpc, alone, AT_ONCE)
        moved, needed = await moved_and_needed(service)
        assert moved == needed == sum(-(-len(r.token_ids.ids) // BLOCK_SIZE) for r in alone)
        answers += await generate_all(service.grpc, together, AT_ONCE)
        moved_then, needed_then = await moved_and_needed(service)
        assert moved_then == needed_then
        assert moved_then - moved < sum(-(-len(r.token_ids.ids) // BLOCK_SIZE) for r in together)
        assert counter(await service.metrics("decode"), FALLBACKS) == 0
    return answers


async def ask_aggregated(folder: Path, requests: list[pb.GenerateRequest]) -> list[Answer]:
    async with running_service(folder, "--both", "1") as service:
        return await generate_all(service.grpc, requests, AT_ONCE)


def test_every_way_gives_the_same_tokens(tmp_path: Path, demo_model: Path) -> None:
    """64 prompts of 1 to 1,500 tokens, 16 at once: pools over tcp = aggregated = offline; greedy = transformers."""
    alone, together = golden_requests()
    requests = alone + together
    assert len(requests) == 64
    for name in ("pools", "aggregated"):
        (tmp_path / name).mkdir()
    pools = asyncio.run(ask_pools(tmp_path / "pools", alone, together))
    aggregated = asyncio.run(ask_aggregated(tmp_path / "aggregated", requests))
    assert token_ids(pools) == token_ids(aggregated)
    assert token_ids(pools) == asyncio.run(offline_answers(demo_model, requests))
    for index, reference in transformers_answers(demo_model, requests).items():
        assert pools[index].token_ids == reference, f"prompt {index} differs from transformers"
    for request, answer in zip(requests, pools, strict=True):
        assert len(answer.token_ids) == request.sampling.max_tokens
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(request.token_ids.ids)
