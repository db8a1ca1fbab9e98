"""Whole engines with the kernels, in bfloat16: log probabilities are the same to the last bit in every form of service."""

import asyncio
import random
from pathlib import Path
from typing import Any, Literal

import pytest

from contract.requests import EngineOutput, EngineRequest, PoolingParams, SamplingParams, TokenLogprobs
from engine.client import EngineClient, InProcessClient
from engine.settings import EngineSettings
from tests.engine_kernels.conftest import MakeCheckpoint
from tests.engine_pair import Sides, outputs_of, running_pair

LENGTHS = (1, 16, 70, 150, 33)
SAMPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=60, ignore_eos=True, logprobs=3)
PROMPTS = {f"r{length}": [random.Random(length).randrange(250) for _ in range(length)] for length in LENGTHS}

Told = list[tuple[int, TokenLogprobs]]


def told(*legs: list[EngineOutput]) -> Told:
    """Every token with its candidates and their log probabilities, exactly."""
    return [
        (token, logprobs)
        for outputs in legs
        for output in outputs
        for token, logprobs in zip(output.token_ids, output.logprobs or (), strict=True)
    ]


async def ask_all(client: EngineClient, *, at_once: bool) -> dict[str, Told]:
    async def ask(name: str) -> Told:
        request = EngineRequest(request_id=name, prompt_token_ids=PROMPTS[name], sampling=SAMPLED)
        return told(await outputs_of(client, request))

    if at_once:
        return dict(zip(PROMPTS, await asyncio.gather(*map(ask, PROMPTS)), strict=True))
    return {name: await ask(name) for name in PROMPTS}


async def one_engine(model: Any, *, at_once: bool, **settings: Any) -> tuple[dict[str, Told], dict[str, int]]:
    client = await InProcessClient.start(EngineSettings(model=model, **settings))
    try:
        return await ask_all(client, at_once=at_once), await client.call("counters")
    finally:
        await client.shutdown()


async def test_batches_chunks_preemption_and_the_hand_over_change_no_bit(checkpoint: MakeCheckpoint) -> None:
    model = checkpoint("qwen3", head_dim=64)
    alone, _ = await one_engine(model, at_once=False, enable_prefix_caching=False)
    assert {len(answer) for answer in alone.values()} == {60}
    crowded, counters = await one_engine(
        model, at_once=True, num_threads=2, max_num_batched_tokens=23, kv_cache_bytes=24 * 16 * 1024
    )
    assert crowded == alone
    assert counters["num_preemptions_total"] > 0
    sides = Sides(transport="shm")
    async with running_pair(model, sides=sides, dtype="bfloat16", max_num_batched_tokens=31) as pair:
        crossed = await asyncio.gather(*(pair.ask(name, PROMPTS[name], SAMPLED) for name in PROMPTS))
    assert dict(zip(PROMPTS, (told(*legs) for legs in crossed), strict=True)) == alone


async def all_states(model: Path, **settings: Any) -> list[list[float]]:
    """What needs every final state of a prompt: its tokens' log probabilities, and its states' mean; the last state too."""

    def embedding(kind: Literal["last", "mean"]) -> EngineRequest:
        wanted = PoolingParams(kind, normalize=True)
        sampling = SamplingParams(max_tokens=1)
        prompt = PROMPTS["r150"]
        return EngineRequest(
            request_id=kind, prompt_token_ids=prompt, sampling=sampling, pooling_params=wanted
        )

    client = await InProcessClient.start(EngineSettings(model=model, dtype="bfloat16", **settings))
    try:
        scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
        request = EngineRequest(request_id="scored", prompt_token_ids=PROMPTS["r150"], sampling=scored)
        (answer,), (mean,), (last,) = await asyncio.gather(
            outputs_of(client, request),
            outputs_of(client, embedding("mean")),
            outputs_of(client, embedding("last")),
        )
    finally:
        await client.shutdown()
    assert answer.prompt_logprobs and mean.pooled and last.pooled
    return [[one.logprob for one in answer.prompt_logprobs], mean.pooled, last.pooled]


async def test_what_needs_all_states_of_a_prompt_has_them(checkpoint: MakeCheckpoint) -> None:
    model = checkpoint("qwen3", head_dim=64)
    plain = await all_states(model, attention_backend="torch")
    for chunk in (512, 23):
        for found, expected in zip(await all_states(model, max_num_batched_tokens=chunk), plain, strict=True):
            assert found == pytest.approx(expected, abs=0.03)
