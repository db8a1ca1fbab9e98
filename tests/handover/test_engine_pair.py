"""The hand-over between two real engines: equal tokens, chunk by chunk, cached prefixes, nothing left behind."""

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from contract.outputs import FinishReason
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.client import InProcessClient
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from tests.engine_pair import Sides, outputs_of, running_pair, tokens_of

BLOCK_SIZE = 16
PROMPT = [random.Random(5).randrange(5, 250) for _ in range(150)]
SAMPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(folder, "llama", seed=3)
    return folder


async def aggregated(model: Path, prompt: list[int], sampling: SamplingParams) -> list[int]:
    client = await InProcessClient.start(EngineSettings(model=model, kv_cache_bytes=16 * 2**20))
    try:
        request = EngineRequest(request_id="alone", prompt_token_ids=prompt, sampling=sampling)
        return tokens_of(await outputs_of(client, request))
    finally:
        await client.shutdown()


async def test_chunked_hand_over_equals_one_engine(model: Path) -> None:
    """A prompt in chunks of 32 tokens; exactly its blocks cross; the first token comes from the prefill leg only."""
    async with running_pair(model, max_num_batched_tokens=32) as pair:
        first, rest = await pair.ask("chunked", PROMPT, SAMPLED)
        counters = await pair.decode.call("counters")
        await pair.until_free()
    assert [len(tokens_of(first)), rest[0].first_index] == [1, 1]
    assert tokens_of(first, rest) == await aggregated(model, PROMPT, SAMPLED)
    assert counters["transfer_blocks_total{transport=tcp}"] == -(-len(PROMPT) // BLOCK_SIZE)
    assert all(len(o.logprobs or ()) == len(o.token_ids) for o in (*first, *rest))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_scheduling_policy_of_each_side_changes_no_token(model: Path, temperature: float) -> None:
    """A25, A30: whole prompts are handed over like chunks, to workers of either policy, greedy and with a seed."""
    sampling = msgspec.structs.replace(SAMPLED, temperature=temperature)
    whole = {"scheduling_policy": "prefill-first", "scheduler_delay_factor": 0.5}
    prompts = [PROMPT, PROMPT[:40], PROMPT[7:90]]
    expected = [await aggregated(model, prompt, sampling) for prompt in prompts]
    for sides in (Sides(prefill=whole, decode=whole), Sides(decode=whole)):
        async with running_pair(model, sides=sides) as pair:
            asked = (pair.ask(f"r{n}", prompt, sampling) for n, prompt in enumerate(prompts))
            assert [tokens_of(*legs) for legs in await asyncio.gather(*asked)] == expected
            await pair.until_free()


ADJUSTED: list[dict[str, Any]] = [
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"repetition_penalty": 1.4},
    {"logit_bias": ((7, 4.0), (9, 4.5)), "min_p": 0.02},
    {"allowed_token_ids": tuple(range(20, 60)), "frequency_penalty": -0.5},
]


@pytest.mark.parametrize("changes", ADJUSTED, ids=lambda changes: "+".join(changes))
async def test_what_changes_logits_crosses_with_the_request(model: Path, changes: dict[str, Any]) -> None:
    """Law 5: penalties count the answer's tokens wherever they were drawn: as one engine does, and as a replay does."""
    sampling = msgspec.structs.replace(SAMPLED, **changes)
    alone = await aggregated(model, PROMPT, sampling)
    assert alone != await aggregated(model, PROMPT, SAMPLED)
    async with running_pair(model, max_num_batched_tokens=64) as pair:
        first, rest = await pair.ask("whole", PROMPT, sampling)
        replayed = await pair.ask("replayed", [*PROMPT, *alone[:5]], sampling, first_index=5, attempt=1)
    assert tokens_of(first, rest) == alone
    assert tokens_of(*replayed) == alone[5:]


async def test_a_cached_prefix_does_not_cross_again(model: Path) -> None:
    """The second prompt shares 6 blocks with the first: only its other blocks cross."""
    shared = PROMPT[: 6 * BLOCK_SIZE]
    async with running_pair(model) as pair:
        await pair.ask("first", [*shared, 7, 8, 9], SAMPLED)
        before = await pair.decode.call("counters")
        await pair.ask("second", [*shared, 17, 18], SAMPLED)
        after = await pair.decode.call("counters")
    name = "transfer_blocks_total{transport=tcp}"
    assert before[name] == 7
    assert after[name] - before[name] == 1
    needed = "transfer_needed_blocks_total"
    assert [before[needed], after[needed]] == [7, 8]


async def test_an_answer_that_ends_at_its_first_token_moves_nothing(model: Path) -> None:
    """max_tokens 1: the prefill leg finishes the answer, and the transfer is closed as not needed."""
    one = SamplingParams(temperature=0.0, max_tokens=1)
    async with running_pair(model) as pair:
        send, receive = pair.legs("short", PROMPT, one)
        waiting = asyncio.create_task(outputs_of(pair.decode, receive))
        first = await outputs_of(pair.prefill, send)
        await pair.decode.abort("short")
        rest = await waiting
        await pair.until_free()
        assert (await pair.decode.call("counters"))["transfer_blocks_total{transport=tcp}"] == 0
    assert first[-1].finish_reason is FinishReason.LENGTH
    assert tokens_of(rest) == []


async def test_an_answer_that_ends_at_its_first_token_is_no_error_at_the_decode_leg(model: Path) -> None:
    """Its end may reach the router before the first token does: an error would take the place of the answer."""
    async with running_pair(model) as pair:
        first, rest = await pair.ask("short", PROMPT, SamplingParams(temperature=0.0, max_tokens=1))
        counters = await pair.decode.call("counters")
    assert first[-1].finish_reason is FinishReason.LENGTH
    assert [(o.finish_reason, o.error_kind, o.token_ids) for o in rest] == [(None, None, [])]
    assert not any(name.startswith("transfer_failures_total") for name in counters)


async def test_abort_before_anybody_fetched_frees_the_loan(model: Path) -> None:
    """The prefill leg has ended with its first token and no decode leg came: its blocks do not wait for the lease's end."""
    async with running_pair(model) as pair:
        send, _ = pair.legs("alone", PROMPT, SAMPLED)
        assert len(tokens_of(await outputs_of(pair.prefill, send))) == 1
        assert (await pair.prefill.call("debug_state"))["leases"] == ["alone#0.0"]
        await pair.prefill.abort("alone", 0)
        await pair.until_free()


@pytest.mark.parametrize("delay_steps", range(0, 12, 2))
async def test_abort_at_any_moment_frees_both_sides(model: Path, delay_steps: int) -> None:
    """B12 over the hand-over: both legs are aborted after some outputs or none; no block and no lease stays."""
    async with running_pair(model, max_num_batched_tokens=16) as pair:
        send, receive = pair.legs(
            "gone", PROMPT, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        )
        legs = [
            asyncio.create_task(outputs_of(c, r)) for c, r in ((pair.prefill, send), (pair.decode, receive))
        ]
        for _ in range(delay_steps):
            await pair.decode.call("stats")
        await pair.prefill.abort("gone")
        await pair.decode.abort("gone")
        endings = [(await leg)[-1] for leg in legs]
        await pair.until_free()
        for state in await pair.idle_states():
            assert state["requests"] == {}
            assert state["leases"] == []
            assert state["blocks"]["quarantined"] == 0
    assert all(ending.is_leg_finished for ending in endings)


async def test_many_at_once_through_small_pools(model: Path) -> None:
    """24 hand-overs that need far more blocks than the pools have at once: all end, with one engine's tokens (law 4)."""
    rng = random.Random(9)
    prompts = [[rng.randrange(5, 250) for _ in range(rng.randint(1, 120))] for _ in range(24)]
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    async with running_pair(model, kv_cache_bytes=24 * 2 * 2 * 2 * 16 * 16 * 4 * 2, max_num_seqs=4) as pair:
        answers = await asyncio.gather(
            *(pair.ask(f"many-{index}", prompt, sampling) for index, prompt in enumerate(prompts))
        )
        await pair.until_free()
    for prompt, (first, rest) in zip(prompts, answers, strict=True):
        assert rest[-1].error_message is None
        assert tokens_of(first, rest) == await aggregated(model, prompt, sampling)
