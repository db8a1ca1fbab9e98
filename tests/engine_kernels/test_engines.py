"""Whole engines with the kernels, in bfloat16: log probabilities are equal to the last bit in every form of service."""

import asyncio
import random
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import pytest

from contract.outputs import EngineOutput, TokenLogprobs
from contract.requests import EngineRequest, PoolingParams
from contract.sampling import SamplingParams
from engine.client import EngineClient, InProcessClient
from engine.core import EngineCore
from engine.outputs import NewRequestData, SchedulerOutput
from engine.settings import EngineSettings
from engine.startup import start_executor
from tests.engine_kernels.conftest import MakeCheckpoint
from tests.engine_pair import Sides, outputs_of, running_pair

LENGTHS = (1, 16, 70, 150, 33)
SAMPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=60, ignore_eos=True, logprobs=3)
PROMPTS = {f"r{length}": [random.Random(length).randrange(250) for _ in range(length)] for length in LENGTHS}

TokensWithLogprobs = list[tuple[int, TokenLogprobs]]

needs_kernels = pytest.mark.usefixtures("kernels")
"""torch computes a row differently in another batch, and its steps are never interrupted."""


def tokens_with_logprobs(*legs: list[EngineOutput]) -> TokensWithLogprobs:
    """Return every token with its candidates and their exact log probabilities."""
    return [
        (token, logprobs)
        for outputs in legs
        for output in outputs
        for token, logprobs in zip(output.token_ids, output.logprobs or (), strict=True)
    ]


async def ask_all(client: EngineClient, *, at_once: bool) -> dict[str, TokensWithLogprobs]:
    async def ask(name: str) -> TokensWithLogprobs:
        request = EngineRequest(request_id=name, prompt_token_ids=PROMPTS[name], sampling=SAMPLED)
        return tokens_with_logprobs(await outputs_of(client, request))

    if at_once:
        return dict(zip(PROMPTS, await asyncio.gather(*map(ask, PROMPTS)), strict=True))
    return {name: await ask(name) for name in PROMPTS}


async def one_engine(
    model: Any, *, at_once: bool, **settings: Any
) -> tuple[dict[str, TokensWithLogprobs], dict[str, int]]:
    client = await InProcessClient.start(EngineSettings(model=model, **settings))
    try:
        return await ask_all(client, at_once=at_once), await client.call("counters")
    finally:
        await client.shutdown()


@needs_kernels
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
    assert dict(zip(PROMPTS, (tokens_with_logprobs(*legs) for legs in crossed), strict=True)) == alone


async def all_states(model: Path, **settings: Any) -> list[list[float]]:
    """Return a prompt's log probabilities, the mean of its states, and its last state. The first two need all states."""

    def embedding(kind: Literal["last", "mean"]) -> EngineRequest:
        pooling = PoolingParams(kind, normalize=True)
        sampling = SamplingParams(max_tokens=1)
        prompt = PROMPTS["r150"]
        return EngineRequest(
            request_id=kind, prompt_token_ids=prompt, sampling=sampling, pooling_params=pooling
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


async def test_requests_that_need_all_states_of_a_prompt_get_them(checkpoint: MakeCheckpoint) -> None:
    model = checkpoint("qwen3", head_dim=64)
    plain = await all_states(model, attention_backend="torch")
    for chunk in (512, 23):
        for found, expected in zip(await all_states(model, max_num_batched_tokens=chunk), plain, strict=True):
            assert found == pytest.approx(expected, abs=0.03)


def stepped(model: Path, *, cut_share: float) -> tuple[dict[str, TokensWithLogprobs], int]:
    """Return the tokens of all prompts, run at once with a share of interrupted steps, and the number of interruptions."""
    settings = EngineSettings(model=model, max_num_batched_tokens=40, max_hold_share=1.0)
    core, rng, found, num_interrupted = (
        EngineCore(settings),
        random.Random(3),
        dict[str, list[EngineOutput]](),
        0,
    )
    for name, prompt in PROMPTS.items():
        core.add_request(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=SAMPLED))

    def meanwhile() -> None:
        nonlocal num_interrupted
        if rng.random() < cut_share:
            num_interrupted += 1
            core.executor.interrupt()

    while core.needs_step():
        for output in chain.from_iterable(core.step(meanwhile, lambda: rng.random() < 0.5).values()):
            found.setdefault(output.request_id, []).append(output)
    core.close()
    return {name: tokens_with_logprobs(outputs) for name, outputs in found.items()}, num_interrupted


@needs_kernels
def test_interrupted_steps_change_no_bit(checkpoint: MakeCheckpoint) -> None:
    model = checkpoint("qwen3", head_dim=64)
    whole, _ = stepped(model, cut_share=0.0)
    cut, num_interrupted = stepped(model, cut_share=0.4)
    assert cut == whole
    assert num_interrupted > 20


@needs_kernels
@pytest.mark.parametrize(
    ("num_tokens", "orders", "may_be_interrupted"), [(1, None, True), (2, None, False), (1, [], False)]
)
def test_only_decode_steps_without_orders_are_interrupted(
    checkpoint: MakeCheckpoint, num_tokens: int, orders: list[Any] | None, may_be_interrupted: bool
) -> None:
    """KV that is published after the step must be there; a chunk of a prompt is too much to compute twice."""
    executor, _ = start_executor(EngineSettings(model=checkpoint("llama")))
    new = NewRequestData("r", [1, 2][:num_tokens], SamplingParams(), ([1],), 0, num_tokens)
    finish = executor.begin(
        SchedulerOutput(
            [new],
            num_scheduled_tokens={"r": num_tokens},
            total_num_scheduled_tokens=num_tokens,
            kv_connector_metadata=orders,
        )
    )
    executor.interrupt()
    assert finish().was_interrupted is may_be_interrupted
    executor.shutdown()
