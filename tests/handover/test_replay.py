"""A replay goes on where the first attempt was cut off: at every position, on either path, with one engine's tokens.

Law 5: attempt n + 1 has the delivered tokens at the end of its prompt; limits, end tokens and the seed's positions count
the whole answer. Law 6 makes the rest equal in float32.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.outputs import EngineOutput, FinishReason
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.client import EngineClient, InProcessClient
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from tests.engine_pair import EnginePair, outputs_of, running_pair, tokens_of

NUM_TOKENS = 14
PROMPT = [random.Random(8).randrange(5, 250) for _ in range(41)]
"""Blocks of 16: the answer fills the third one at its seventh token."""


@dataclass
class Case:
    """One way of sampling. ``ends``: what undisturbed runs end with."""

    sampling: SamplingParams
    ends: FinishReason = FinishReason.LENGTH
    fields: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", seed=3)


@asynccontextmanager
async def one_engine(model: Path) -> AsyncIterator[EngineClient]:
    """The engine that nothing happens to: it hands nothing over, caches nothing, and serves one request at a time."""
    settings = EngineSettings(
        model=model, dtype="float32", kv_cache_bytes=16 * 2**20, enable_prefix_caching=False
    )
    client = await InProcessClient.start(settings)
    try:
        yield client
    finally:
        await client.shutdown()


async def cases_on(client: EngineClient) -> list[Case]:
    """Greedy, seeded, and answers that an id of theirs ends: as stop token and as the model's own end token."""
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
    seeded = SamplingParams(
        temperature=1.3, top_p=0.9, top_k=60, seed=77, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2
    )
    early = tokens_of(await undisturbed(client, Case(seeded)))[2]
    without = SamplingParams(**{**fields_of(seeded), "stop_token_ids": (early,), "min_tokens": NUM_TOKENS})
    tokens = tokens_of(await undisturbed(client, Case(without)))
    late = next(token for token in tokens[8:] if token not in tokens[:8])
    stopped = {"stop_token_ids": (late, early), "min_tokens": 6}
    return [
        Case(greedy),
        Case(seeded),
        Case(SamplingParams(**{**fields_of(seeded), **stopped}), FinishReason.STOP),
        Case(
            SamplingParams(**{**fields_of(seeded), "ignore_eos": False, "min_tokens": 6}),
            FinishReason.STOP,
            {"eos_token_ids": (late, early)},
        ),
    ]


def fields_of(sampling: SamplingParams) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}


async def undisturbed(client: EngineClient, case: Case) -> list[EngineOutput]:
    request = EngineRequest(
        request_id="undisturbed", prompt_token_ids=PROMPT, sampling=case.sampling, **case.fields
    )
    return await outputs_of(client, request)


async def replay(pair: EnginePair, case: Case, name: str, delivered: list[int]) -> list[EngineOutput]:
    """The next attempt over both engines, from behind the delivered tokens."""
    prompt, first_index = [*PROMPT, *delivered], len(delivered)
    fields = {"attempt": 1, "first_index": first_index, **case.fields}
    first, rest = await pair.ask(name, prompt, case.sampling, **fields)
    # The first token may end the answer and its lease, on which a read of the other leg then fails.
    return first if any(output.finish_reason for output in first) else [*first, *rest]


async def recompute(pair: EnginePair, case: Case, name: str, delivered: list[int]) -> list[EngineOutput]:
    """The next attempt on the decode engine alone."""
    request = EngineRequest(
        request_id=name,
        prompt_token_ids=[*PROMPT, *delivered],
        sampling=case.sampling,
        attempt=2,
        first_index=len(delivered),
        **case.fields,
    )
    return await outputs_of(pair.decode, request)


def assert_continues(outputs: list[EngineOutput], whole: list[EngineOutput], cut: int, case: Case) -> None:
    """The same tokens, indices, log probabilities and end."""
    expected = tokens_of(whole)
    assert [o.error_message for o in outputs if o.error_message] == []
    indices = [o.first_index + place for o in outputs for place in range(len(o.token_ids))]
    assert indices == list(range(cut, len(expected)))
    assert tokens_of(outputs) == expected[cut:]
    (end,) = [output for output in outputs if output.finish_reason]
    assert (end.finish_reason, end.stop_reason) == (case.ends, whole[-1].stop_reason)
    got = [entry for output in outputs for entry in output.logprobs or ()]
    wanted = [entry for output in whole for entry in output.logprobs or ()][cut:]
    for ours, theirs in zip(got, wanted, strict=True):
        assert (ours.token_id, ours.rank, ours.top_token_ids) == (
            theirs.token_id, theirs.rank, theirs.top_token_ids,
        )  # fmt: skip
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize("is_cached", [False, True], ids=["cold", "cached"])
async def test_every_cut_goes_on_as_if_nothing_had_happened(model: Path, is_cached: bool) -> None:
    """Both paths; cached: the engines that ran the first attempt find its blocks again, the answer's included."""
    async with one_engine(model) as alone, running_pair(model, enable_prefix_caching=is_cached) as pair:
        for number, case in enumerate(await cases_on(alone)):
            whole = await undisturbed(alone, case)
            tokens = tokens_of(whole)
            assert whole[-1].finish_reason is case.ends and len(tokens) > case.sampling.min_tokens
            assert_continues(await replay(pair, case, f"first-{number}", []), whole, 0, case)
            for cut in range(len(tokens)):
                for go_on in (replay, recompute):
                    outputs = await go_on(pair, case, f"{number}-{cut}", tokens[:cut])
                    assert_continues(outputs, whole, cut, case)
        counters = await pair.decode.call("counters")
        await pair.until_free()
    assert (counters["prefix_cache_hits_total"] > 0) is is_cached


async def test_every_cut_at_once_with_preemption_in_the_way(model: Path) -> None:
    """All cuts of all cases together, on both paths, in a decode pool that holds three of them."""
    block_bytes = 2 * 2 * 2 * 16 * 16 * 4
    async with (
        one_engine(model) as alone,
        running_pair(
            model, kv_cache_bytes=14 * block_bytes, max_num_seqs=6, max_num_batched_tokens=24
        ) as pair,
    ):
        jobs = []
        for number, case in enumerate(await cases_on(alone)):
            whole = await undisturbed(alone, case)
            tokens = tokens_of(whole)
            for cut in range(len(tokens)):
                jobs += [
                    (go_on(pair, case, f"{number}-{cut}", tokens[:cut]), whole, cut, case)
                    for go_on in (replay, recompute)
                ]
        answers = await asyncio.gather(*(job for job, *_ in jobs))
        counters = await pair.decode.call("counters")
        await pair.until_free()
    assert counters["num_preemptions_total"] > 0
    for outputs, (_, whole, cut, case) in zip(answers, jobs, strict=True):
        assert_continues(outputs, whole, cut, case)


async def test_a_replay_that_claims_more_than_the_answer_is_refused(model: Path) -> None:
    """Delivered tokens that the prompt cannot hold, or an answer that has ended already: one clear error."""
    sampling = SamplingParams(temperature=0.0, max_tokens=4)
    async with one_engine(model) as alone:
        for prompt, first_index in (([1, 2, 3, 4, 5, 6], 4), ([1, 2, 3], 3), ([1], 1)):
            request = EngineRequest(
                request_id="r", prompt_token_ids=prompt, sampling=sampling, first_index=first_index
            )
            (refusal,) = await outputs_of(alone, request)
            assert refusal.error_kind == "invalid_request"
            assert f"first_index is {first_index}" in (refusal.error_message or "")


async def test_a_salt_isolates_caches_through_the_hand_over(model: Path) -> None:
    """B11: what was fetched under one cache_salt is found under the same only; under another it crosses again."""
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    crossed, cached = [], []
    async with running_pair(model) as pair:
        for name, salt in (("a", "mine"), ("b", "mine"), ("c", "yours"), ("d", "")):
            first, rest = await pair.ask(name, PROMPT, sampling, cache_salt=salt)
            counters = await pair.decode.call("counters")
            crossed.append(counters["transfer_needed_blocks_total"])
            cached.append((first[0].num_cached_tokens, rest[0].num_cached_tokens))
    assert cached == [(0, 0), (32, 32), (0, 0), (0, 0)]
    assert crossed == [3, 4, 7, 10]
