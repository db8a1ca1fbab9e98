"""Drafts across the hand-over, replays and moves: the answer is that of one engine without drafts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from contract.errors import NotFoundError
from contract.outputs import EngineOutput
from contract.requests import EngineRequest
from contract.sampling import Grammar, SamplingParams
from engine.client import EngineClient, InProcessClient
from engine.settings import EngineSettings
from tests.checkpoints import EOS_ID, write_checkpoint
from tests.drafting_engines import copying_model
from tests.engine_pair import EnginePair, outputs_of, running_pair, tokens_of
from tests.families.tiny_models import make_tiny
from tests.handover.handing_off import Moving, ping_pong

pytestmark = pytest.mark.usefixtures("free_drafts")

PROMPT = [1, 2, 3, *range(104, 112), *range(104, 112), 104, 105]
CASES = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=60, logprobs=1),
    "seeded": SamplingParams(temperature=1.0, max_tokens=60, seed=5, logprobs=1),
    "grammar": SamplingParams(
        temperature=0.5, max_tokens=60, seed=5, grammar=Grammar("regex", "([h-o]{3}-){2,12}")
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return copying_model(tmp_path_factory.mktemp("model"), torch.float32)


@asynccontextmanager
async def drafting_pair(model: Path) -> AsyncIterator[EnginePair]:
    async with running_pair(model, speculate="ngram", num_speculative_tokens=4) as pair:
        yield pair


def request_of(kind: str, name: str) -> EngineRequest:
    return EngineRequest(
        request_id=name, prompt_token_ids=PROMPT, sampling=CASES[kind], eos_token_ids=(EOS_ID,)
    )


async def undisturbed(model: Path) -> dict[str, list[EngineOutput]]:
    client = await InProcessClient.start(
        EngineSettings(model=model, dtype="float32", kv_cache_bytes=2**22, enable_prefix_caching=False)
    )
    try:
        return {kind: await outputs_of(client, request_of(kind, kind)) for kind in CASES}
    finally:
        await client.shutdown()


def logprobs_of(outputs: list[EngineOutput]) -> list[tuple[int, int]]:
    return [(entry.token_id, entry.rank) for output in outputs for entry in output.logprobs or ()]


async def num_accepted(pair: EnginePair) -> list[float]:
    name = "spec_decode_num_accepted_tokens_total"
    return [(await client.call("counters"))[name] for client in (pair.prefill, pair.decode)]


async def moved_thrice(engines: list[tuple[EngineClient, str]], request: EngineRequest) -> Moving:
    """Ask again if an answer has ended before the order to hand it off came: a step with drafts has several tokens."""
    for number in count():
        with suppress(NotFoundError):
            name = f"moved-{request.request_id}-{number}"
            return await ping_pong(engines, msgspec.structs.replace(request, request_id=name), 9, 3)
    raise AssertionError


async def test_handed_over_replayed_and_moved_answers_are_equal(model: Path) -> None:
    """B3, laws 4 to 6: drafts are the decode side's; a replay and a move begin with tokens that drafts have given."""
    expected = await undisturbed(model)
    async with drafting_pair(model) as pair:
        for kind, sampling in CASES.items():
            whole = tokens_of(expected[kind])
            first, rest = await pair.ask(kind, PROMPT, sampling, eos_token_ids=(EOS_ID,))
            assert tokens_of(first, rest) == whole
            assert logprobs_of([*first, *rest]) == logprobs_of(expected[kind])
            for cut in (1, 17, len(whole) - 2):
                outputs = await pair.ask(
                    f"{kind}-{cut}",
                    [*PROMPT, *whole[:cut]],
                    sampling,
                    attempt=1,
                    first_index=cut,
                    eos_token_ids=(EOS_ID,),
                )
                assert whole[:cut] + tokens_of(*outputs) == whole
        accepted = await num_accepted(pair)
        assert accepted[0] == 0 < accepted[1]
        engines = [(pair.prefill, "boot-prefill"), (pair.decode, "boot-decode")]
        moved = await asyncio.gather(*(moved_thrice(engines, request_of(kind, kind)) for kind in CASES))
        for kind, moving in zip(CASES, moved, strict=True):
            assert moving.tokens == tokens_of(expected[kind])
            assert logprobs_of(moving.outputs) == logprobs_of(expected[kind])
            assert moving.num_moves == 3
        await pair.until_free()
        assert all(after > before for before, after in zip(accepted, await num_accepted(pair), strict=True))


async def test_choices_have_drafts_of_their_own(model: Path) -> None:
    """They separate behind the prompt, on either path."""
    sampling = msgspec.structs.replace(CASES["seeded"], logprobs=None)
    found: list[dict[int, list[int]]] = []
    async with running_pair(model) as plain, drafting_pair(model) as pair:
        for one in (plain, pair):
            _, rest = await one.ask("r", PROMPT, sampling, num_choices=3)
            tokens: dict[int, list[int]] = {}
            for output in rest:
                tokens.setdefault(output.choice, []).extend(output.token_ids)
            found.append(tokens)
        assert (await num_accepted(pair))[1] > 10
    assert found[0] == found[1]
    assert len(found[0]) == 3 and len({tuple(tokens) for tokens in found[0].values()}) == 3


@pytest.mark.parametrize("family", ["lfm2", pytest.param("qwen3_5_text", marks=pytest.mark.slow)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_states_without_wrong_drafts_are_handed_over(
    tmp_path: Path, family: str, temperature: float
) -> None:
    """An answer of a model with recurrent layers is moved and replayed behind steps whose drafts were wrong in part."""
    folder = write_checkpoint(tmp_path, make_tiny(family), 3)
    # Tokens that repeat themselves often, and not always.
    sampling = SamplingParams(
        temperature=temperature, seed=7, max_tokens=60, ignore_eos=True, allowed_token_ids=(5, 6, 7)
    )
    request = EngineRequest(request_id="r", prompt_token_ids=[5, 6, 7, 8] * 6, sampling=sampling)
    small: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 160}
    plain = await InProcessClient.start(
        EngineSettings(model=folder, dtype="float32", kv_cache_bytes=2**22, **small)
    )
    whole = tokens_of(await outputs_of(plain, request))
    await plain.shutdown()
    async with running_pair(folder, speculate="ngram", num_speculative_tokens=4, **small) as pair:
        first, rest = await pair.ask("r", request.prompt_token_ids, sampling)
        assert tokens_of(first, rest) == whole
        for cut in (1, 17, len(whole) - 2):
            prompt = [*request.prompt_token_ids, *whole[:cut]]
            legs = await pair.ask(f"r-{cut}", prompt, sampling, attempt=1, first_index=cut)
            assert whole[:cut] + tokens_of(*legs) == whole
        moving = await moved_thrice([(pair.prefill, "boot-prefill"), (pair.decode, "boot-decode")], request)
        assert (moving.tokens, moving.num_moves) == (whole, 3)
        assert all(accepted > 0 for accepted in await num_accepted(pair))
        await pair.until_free()
