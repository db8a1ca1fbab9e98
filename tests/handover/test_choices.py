"""Several answers to one prompt: its KV is computed and handed over once, and each choice is what it would be alone."""

import asyncio
import random
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from contract.outputs import EngineOutput, FinishReason, TokenLogprobs
from contract.requests import EngineRequest
from contract.sampling import SamplingParams, choice_seed
from engine.client import EngineClient, InProcessClient
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from tests.engine_pair import Sides, outputs_of, running_pair, tokens_of

NUM_CHOICES = 5
NUM_TOKENS = 14
SAMPLING = SamplingParams(
    temperature=1.3, seed=77, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, presence_penalty=0.5
)
LENGTHS = [41, 48, 47, 5]
"""Tokens of a prompt: the last block of 16 is partly full, full, full with the first token; and there is only one."""
Answer = tuple[list[int], list[TokenLogprobs], FinishReason | None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", seed=3)


def prompt_of(length: int) -> list[int]:
    return [random.Random(length).randrange(5, 250) for _ in range(length)]


def by_choice(*legs: list[EngineOutput]) -> dict[int, Answer]:
    """Tokens, log probabilities and end of each choice, over both legs."""
    said: defaultdict[int, list[EngineOutput]] = defaultdict(list)
    for outputs in legs:
        for output in outputs:
            said[output.choice].append(output)
    return {
        choice: (
            tokens_of(outputs),
            [entry for output in outputs for entry in output.logprobs or ()],
            next((output.finish_reason for output in outputs if output.finish_reason), None),
        )
        for choice, outputs in said.items()
    }


def assert_same(found: dict[int, Answer], expected: dict[int, Answer]) -> None:
    """Equal tokens and ends; log probabilities but for the order of sums, which the batch decides."""
    assert found.keys() == expected.keys()
    for choice, (tokens, logprobs, end) in expected.items():
        assert found[choice][0] == tokens and found[choice][2] is end
        for entry, wanted in zip(found[choice][1], logprobs, strict=True):
            assert (entry.token_id, entry.rank) == (wanted.token_id, wanted.rank)
            assert entry.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert entry.top_token_ids == wanted.top_token_ids


async def start_engine(model: Path, **settings: object) -> EngineClient:
    small = {"model": model, "dtype": "float32", "kv_cache_bytes": 16 * 2**20, **settings}
    return await InProcessClient.start(EngineSettings(**small))  # type: ignore[arg-type]


async def alone(model: Path, length: int, sampling: SamplingParams = SAMPLING) -> dict[int, Answer]:
    """Compute each choice with an engine that has none of the others."""
    engine = await start_engine(model, enable_prefix_caching=False)
    try:
        found = {}
        for choice in range(NUM_CHOICES):
            fields = {name: getattr(sampling, name) for name in SamplingParams.__struct_fields__}
            own = SamplingParams(**{**fields, "seed": choice_seed(sampling.seed, choice)})
            request = EngineRequest(
                request_id=f"alone-{choice}", prompt_token_ids=prompt_of(length), sampling=own
            )
            found[choice] = by_choice(await outputs_of(engine, request))[0]
        return found
    finally:
        await engine.shutdown()


def the_request(length: int, sampling: SamplingParams = SAMPLING) -> EngineRequest:
    return EngineRequest(
        request_id="r", prompt_token_ids=prompt_of(length), sampling=sampling, num_choices=NUM_CHOICES
    )


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("caches", [True, False])
async def test_choices_of_one_engine_are_what_they_would_be_alone(
    model: Path, length: int, caches: bool
) -> None:
    expected = await alone(model, length)
    assert len({tuple(answer[0]) for answer in expected.values()}) > 1
    engine = await start_engine(model, enable_prefix_caching=caches)
    try:
        assert_same(by_choice(await outputs_of(engine, the_request(length))), expected)
        counters = await engine.call("counters")
        assert counters["prompt_tokens_total"] == length
        await engine.call("check_integrity")
        assert (await engine.call("debug_state"))["blocks"]["held"] == 0
    finally:
        await engine.shutdown()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("length", LENGTHS)
async def test_the_kv_crosses_once_and_the_choices_are_the_same(
    model: Path, length: int, transport: str
) -> None:
    expected = await alone(model, length)
    async with running_pair(model, sides=Sides(transport=transport)) as pair:
        sent, received = await pair.ask("r", prompt_of(length), SAMPLING, num_choices=NUM_CHOICES)
        assert_same(by_choice(sent, received), expected)
        assert sorted(output.choice for output in sent) == list(range(NUM_CHOICES))
        prefilled, decoded = [await side.call("counters") for side in (pair.prefill, pair.decode)]
        await pair.until_free()
    assert (prefilled["prompt_tokens_total"], decoded["prompt_tokens_total"]) == (length, 0)
    assert decoded["received_tokens_total"] == length


async def test_where_blocks_run_short_choices_are_computed_again_and_equal(model: Path) -> None:
    """Seven blocks: two full ones of the prompt, and two of each choice's own."""
    expected = await alone(model, 41)
    engine = await start_engine(model)
    block_bytes = engine.info.layout.block_bytes
    await engine.shutdown()
    engine = await start_engine(model, max_model_len=64, kv_cache_bytes=8 * block_bytes)
    try:
        assert_same(by_choice(await outputs_of(engine, the_request(41))), expected)
        assert (await engine.call("counters"))["num_preemptions_total"] > 0
    finally:
        await engine.shutdown()


async def test_choices_whose_first_token_is_the_whole_answer_are_not_decoded(model: Path) -> None:
    """Some end at the prefill worker, the others go on; where all end there, nothing crosses."""
    first = {choice: answer[0][0] for choice, answer in (await alone(model, 41)).items()}
    ends = first[1]
    assert set(first.values()) != {ends}
    fields = {name: getattr(SAMPLING, name) for name in SamplingParams.__struct_fields__}
    sampling = SamplingParams(**{**fields, "stop_token_ids": (ends,)})
    expected = await alone(model, 41, sampling)
    async with running_pair(model) as pair:
        sent, received = await pair.ask("r", prompt_of(41), sampling, num_choices=NUM_CHOICES)
        ended_there = {output.choice for output in sent if output.finish_reason}
        assert_same(by_choice(sent, received), expected)
        assert ended_there == {choice for choice, token in first.items() if token == ends}
        one = SamplingParams(**{**fields, "max_tokens": 1})
        sent, received = await pair.ask("s", prompt_of(48), one, num_choices=3)
        assert {output.finish_reason for output in sent} == {FinishReason.LENGTH}
        assert tokens_of(received) == [] and len(received) == 3
        assert (await pair.decode.call("counters"))["received_tokens_total"] == 41
        await pair.until_free()


async def test_a_choice_is_cancelled_alone_and_all_of_them_together(model: Path) -> None:
    async with running_pair(model) as pair:
        send, receive = pair.legs("r", prompt_of(41), SAMPLING, num_choices=NUM_CHOICES)
        receiving = asyncio.create_task(outputs_of(pair.decode, receive))
        await asyncio.sleep(0)
        for choice in (0, 3):
            await pair.decode.abort("r", 0, choice)  # its KV is not even on the way
        sent = await outputs_of(pair.prefill, send)
        answers = by_choice(sent, await receiving)
        expected = await alone(model, 41)
        for choice in (1, 2, 4):
            assert_same({choice: answers[choice]}, {choice: expected[choice]})
        for choice in (0, 3):
            assert answers[choice][2] is FinishReason.ABORT and len(answers[choice][0]) == 1
        await pair.until_free()
        _, waiting = pair.legs("s", prompt_of(48), SAMPLING, num_choices=3)
        ending = asyncio.create_task(outputs_of(pair.decode, waiting))
        await asyncio.sleep(0)
        for choice in (2, 0, 1):
            assert not ending.done()
            await pair.decode.abort("s", 0, choice)
        assert {output.finish_reason for output in await ending} == {FinishReason.ABORT}
        await pair.until_free()
