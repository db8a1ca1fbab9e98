"""Answers that match a grammar cross the hand-over, preemption and replays: valid, and as one engine computes them."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.outputs import EngineOutput, FinishReason
from contract.requests import EngineRequest
from contract.sampling import Grammar, SamplingParams, choice_seed
from engine.client import EngineClient, InProcessClient
from engine.settings import EngineSettings
from tests.checkpoints import EOS_ID, make_checkpoint
from tests.engine_pair import EnginePair, outputs_of, running_pair, tokens_of

PROMPT = [random.Random(8).randrange(5, 250) for _ in range(41)]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["first", "second"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " ?"},
}
GRAMMARS = {
    "json_schema": Grammar("json_schema", json.dumps(SCHEMA)),
    "regex": Grammar("regex", r"[a-z]{3}(-[0-9]{2}){4}"),
    "choice": Grammar("choice", json.dumps(["yes, of course", "yes, but", "no"])),
    "ebnf": Grammar("ebnf", 'root ::= item{4}\nitem ::= "<" [a-c]{2} ">" | "(" item ")"'),
}
SEEDS = range(4)
SLOW = {"json_schema": pytest.mark.slow}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", seed=3)


@asynccontextmanager
async def one_engine(model: Path, **settings: Any) -> AsyncIterator[EngineClient]:
    both = {"dtype": "float32", "kv_cache_bytes": 16 * 2**20, **settings}
    client = await InProcessClient.start(EngineSettings(model=model, **both))
    try:
        yield client
    finally:
        await client.shutdown()


def sampling_of(name: str, seed: int, **changes: Any) -> SamplingParams:
    fields = {"temperature": 1.0, "seed": seed, "max_tokens": 120, "grammar": GRAMMARS[name], **changes}
    return SamplingParams(**fields)


async def alone(client: EngineClient, sampling: SamplingParams, **fields: Any) -> list[EngineOutput]:
    """All of an answer, or what is left of it, from an engine that computes the prompt itself."""
    both = {"request_id": "alone", "prompt_token_ids": PROMPT, "eos_token_ids": (EOS_ID,), **fields}
    return await outputs_of(client, EngineRequest(sampling=sampling, **both))


async def handed_over(
    pair: EnginePair, name: str, sampling: SamplingParams, **fields: Any
) -> list[EngineOutput]:
    first, rest = await pair.ask(
        name, fields.pop("prompt", PROMPT), sampling, eos_token_ids=(EOS_ID,), **fields
    )
    return [*first, *rest]


def text_of(tokens: list[int]) -> str:
    """One token is one byte; the end token is none."""
    return bytes(token for token in tokens if token != EOS_ID).decode()


def assert_matches(name: str, outputs: list[EngineOutput]) -> None:
    """Assert that an independent checker accepts the answer, and that the model's own end token ended it."""
    assert [output.error_message for output in outputs if output.error_message] == []
    tokens = tokens_of(outputs)
    text = text_of(tokens)
    (end,) = [output for output in outputs if output.finish_reason]
    assert end.finish_reason is FinishReason.STOP and tokens[-1] == EOS_ID
    match name:
        case "json_schema":
            found = json.loads(text)
            assert list(found) == ["name", "kind", "sizes"] and len(found["name"]) <= 6
            assert found["kind"] in ("first", "second") and all(0 <= size <= 99 for size in found["sizes"])
        case "choice":
            assert text in json.loads(GRAMMARS[name].text)
        case "regex":
            assert len(text) == 15 and text[:3].isalpha() and text.count("-") == 4
        case _:
            assert text.count("<") == text.count(">") == 4 and text.count("(") == text.count(")")


@pytest.mark.parametrize("name", GRAMMARS)
async def test_valid_and_equal_over_the_hand_over(model: Path, name: str) -> None:
    """At temperature 1, for several seeds at once: the first token is masked at one side, the others at the other."""
    async with one_engine(model) as engine, running_pair(model, max_num_batched_tokens=16) as pair:
        params = [sampling_of(name, seed) for seed in SEEDS]
        wholes = [await alone(engine, sampling) for sampling in params]
        answers = await asyncio.gather(
            *(handed_over(pair, f"r{sampling.seed}", sampling) for sampling in params)
        )
        await pair.until_free()
    for whole, outputs in zip(wholes, answers, strict=True):
        assert_matches(name, whole)
        assert_matches(name, outputs)
        assert tokens_of(outputs) == tokens_of(whole)
    assert name == "choice" or len({tuple(tokens_of(whole)) for whole in wholes}) == len(SEEDS)


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in GRAMMARS])
async def test_a_replay_from_every_place_goes_on_alike(model: Path, name: str) -> None:
    """On both paths, whatever of the answer was delivered: the matcher has followed it."""
    sampling = sampling_of(name, 7)
    async with one_engine(model) as engine, running_pair(model) as pair:
        whole = tokens_of(await alone(engine, sampling))
        for cut in range(len(whole)):
            prompt = [*PROMPT, *whole[:cut]]
            rest = await handed_over(pair, f"r{cut}", sampling, prompt=prompt, attempt=1, first_index=cut)
            again = await alone(
                pair.decode,
                sampling,
                prompt_token_ids=prompt,
                attempt=2,
                first_index=cut,
                request_id=f"a{cut}",
            )
            assert tokens_of(rest) == tokens_of(again) == whole[cut:]
        await pair.until_free()


async def test_preemption_in_the_way(model: Path) -> None:
    """A pool that holds half of them: every answer is what it is with room for all.

    In the second round the grammars are compiled already, so that all answers begin together however busy the machine is.
    """
    block_bytes = 2 * 2 * 2 * 16 * 16 * 4
    params = [sampling_of(name, seed) for name in ("json_schema", "regex") for seed in SEEDS]

    async def answers(**settings: Any) -> tuple[list[list[int]], float]:
        async with one_engine(model, enable_prefix_caching=False, **settings) as engine:
            found = list[list[int]]()
            for name in ("first", "second"):
                jobs = (alone(engine, one, request_id=f"{name}{number}") for number, one in enumerate(params))
                found += [tokens_of(outputs) for outputs in await asyncio.gather(*jobs)]
            return found, (await engine.call("counters"))["num_preemptions_total"]

    roomy, _ = await answers()
    tight, num_preemptions = await answers(kv_cache_bytes=14 * block_bytes)
    assert num_preemptions > 0 and tight == roomy


async def test_an_answer_that_no_token_can_end_stops_where_its_grammar_ends(model: Path) -> None:
    """ignore_eos, and min_tokens beyond the grammar's end: no end token, the same text on both ways."""
    for changes in ({"ignore_eos": True}, {"min_tokens": 60}):
        sampling = sampling_of("regex", 1, **changes)
        async with one_engine(model) as engine, running_pair(model) as pair:
            whole = await alone(engine, sampling)
            outputs = await handed_over(pair, "r", sampling)
        assert tokens_of(outputs) == tokens_of(whole) and len(tokens_of(whole)) == 15
        assert whole[-1].finish_reason is outputs[-1].finish_reason is FinishReason.STOP


async def test_what_does_not_compile_ends_both_legs_and_nothing_else(model: Path) -> None:
    sampling = SamplingParams(max_tokens=4, grammar=Grammar("regex", "(a"))
    plain = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    async with running_pair(model) as pair:
        (first, rest), (other, others) = await asyncio.gather(
            pair.ask("bad", PROMPT, sampling), pair.ask("good", PROMPT, plain)
        )
        await pair.until_free()
    for outputs in (first, rest):
        assert [(o.error_kind, o.error_param) for o in outputs] == [("invalid_request", "grammar")]
    assert len(tokens_of(other, others)) == 4


async def test_choices_of_one_prompt_each_follow_the_grammar(model: Path) -> None:
    """Four: one compilation, one hand-over; each choice goes its own way in the grammar, and is what it is alone."""
    fields: dict[str, Any] = {"eos_token_ids": (EOS_ID,), "num_choices": 4}
    async with one_engine(model) as engine, running_pair(model) as pair:
        for name in GRAMMARS:
            sampling = sampling_of(name, 5)
            first, rest = await pair.ask(name, PROMPT, sampling, **fields)
            together = await alone(engine, sampling, num_choices=4)
            for choice in range(4):
                seed = choice_seed(5, choice)
                expected = await alone(engine, sampling_of(name, seed))
                assert_matches(name, expected)
                for outputs in ([*first, *rest], together):
                    own = [output for output in outputs if output.choice == choice]
                    assert tokens_of(own) == tokens_of(expected)
        await pair.until_free()
