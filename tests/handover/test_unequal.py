"""Hand-overs between engines with other block sizes and dtypes: what arrives is what the sender has, rounded once.

The reference is the same two engines joined by a connector without blocks and plans (``plain_connector``).
"""

import asyncio
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import ErrorKind
from contract.outputs import FinishReason
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.client import InProcessClient
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from tests.engine_pair import EnginePair, Sides, outputs_of, running_pair, tokens_of
from tests.handover.plain_connector import Shelf
from tests.kv_transfer.fakes import CorruptingReceiver

_RNG = random.Random(5)
SHARED = [_RNG.randrange(5, 250) for _ in range(96)]
PROMPTS = [
    [_RNG.randrange(5, 250) for _ in range(150)],
    *([*SHARED, *(_RNG.randrange(5, 250) for _ in range(count))] for count in (1, 40, 16)),
    *([_RNG.randrange(5, 250) for _ in range(count)] for count in (1, 15, 16, 17, 31, 32, 33, 64)),
]
"""Lengths at and around the ends of blocks, and three prompts that share what is full blocks on both sides."""
SAMPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=20, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
CHUNK = 48
SMALL: dict[str, Any] = {"block_size": 16}
LARGE: dict[str, Any] = {"block_size": 32}
FULL: dict[str, Any] = {"dtype": "float32"}
HALF: dict[str, Any] = {"dtype": "bfloat16"}
Settings = dict[str, Any]
Cases = dict[str, tuple[Settings, Settings]]
CUTS: Cases = {"16 to 32": (SMALL, LARGE), "32 to 16": (LARGE, SMALL)}
DTYPES: Cases = {
    "widened": (HALF, FULL),
    "rounded": (FULL, HALF),
    "widened, 16 to 32": ({**HALF, **SMALL}, {**FULL, **LARGE}),
    "rounded, 32 to 16": ({**FULL, **LARGE}, {**HALF, **SMALL}),
}
HALF_KV: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "bfloat16"}
KV_DTYPES: Cases = {
    "rounded into the pool": (FULL, HALF_KV),
    "widened out of the pool, 16 to 32": ({**HALF_KV, **SMALL}, {**FULL, **LARGE}),
}
BOTH: Cases = {name: DTYPES[name] for name in ("widened, 16 to 32", "rounded, 32 to 16")}


def parametrize(cases: Cases) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("prefill", "decode"), cases.values(), ids=list(cases))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", seed=3)


async def answers_of(pair: EnginePair) -> list[list[int]]:
    """Every prompt, one after the other; the legs of each too, so that the reference can serve them."""
    answers = []
    for index, prompt in enumerate(PROMPTS):
        send, receive = pair.legs(f"r{index}", prompt, SAMPLED if index % 2 else GREEDY)
        first = await outputs_of(pair.prefill, send)
        rest = await outputs_of(pair.decode, receive)
        assert rest[-1].error_message is None
        answers.append(tokens_of(first, rest))
    return answers


async def alone(model: Path, prompt: list[int], sampling: SamplingParams, **settings: Any) -> list[int]:
    client = await InProcessClient.start(EngineSettings(model=model, kv_cache_bytes=16 * 2**20, **settings))
    try:
        request = EngineRequest(request_id="alone", prompt_token_ids=prompt, sampling=sampling)
        return tokens_of(await outputs_of(client, request))
    finally:
        await client.shutdown()


@parametrize(CUTS | DTYPES | KV_DTYPES)
async def test_tokens_are_those_of_kv_that_is_rounded_the_same_way(
    model: Path, prefill: Settings, decode: Settings
) -> None:
    """D12: prompts of all lengths, chunked, with shared prefixes, over both transports: equal to the plain reference."""
    joined = partial(running_pair, model, max_num_batched_tokens=CHUNK)
    async with joined(sides=Sides(prefill, decode, connect=Shelf().connect)) as reference:
        expected = await answers_of(reference)
    for transport in ("tcp", "shm"):
        async with joined(sides=Sides(prefill, decode, transport)) as pair:
            assert await answers_of(pair) == expected
            counters = await pair.decode.call("counters")
            await pair.until_free()
        assert counters["transfer_converting_links_total"] == 1
        assert counters["transfer_converted_blocks_total"] == counters["transfer_needed_blocks_total"]
        assert counters["transfer_staging_bytes"] == 0


@parametrize(CUTS)
async def test_another_block_size_changes_no_token(model: Path, prefill: Settings, decode: Settings) -> None:
    """In float32: as if one engine had answered alone, many at once through pools that do not hold them all (law 4)."""
    small: Settings = {"kv_cache_bytes": 12 * 2 * 2 * 2 * 32 * 16 * 4 * 2, "max_num_seqs": 4}
    async with running_pair(model, sides=Sides(prefill, decode), **small) as pair:
        asked = (pair.ask(f"many-{index}", prompt, GREEDY) for index, prompt in enumerate(PROMPTS))
        answers = await asyncio.gather(*asked)
        await pair.until_free()
    for prompt, (first, rest) in zip(PROMPTS, answers, strict=True):
        assert rest[-1].error_message is None
        assert tokens_of(first, rest) == await alone(model, prompt, GREEDY)


async def test_kv_of_one_dtype_crosses_as_it_is(model: Path) -> None:
    """D12: pools of bfloat16 beside float32 on both sides: nothing is converted, and the answer is that of one engine."""
    async with running_pair(model, sides=Sides(HALF_KV, HALF_KV, "shm")) as pair:
        for index, prompt in enumerate(PROMPTS[:3]):
            first, rest = await pair.ask(f"r{index}", prompt, GREEDY)
            assert tokens_of(first, rest) == await alone(model, prompt, GREEDY, **HALF_KV)
        counters = await pair.decode.call("counters")
        await pair.until_free()
    assert counters["transfer_converted_blocks_total"] == 0


@parametrize(BOTH)
async def test_many_converted_prompts_share_a_small_pool(
    model: Path, prefill: Settings, decode: Settings
) -> None:
    """Answers outgrow the pool, so some are preempted and computed here: each ends whole, nothing stays behind."""
    per_token = 2 * 2 * 2 * 16 * (4 if decode["dtype"] == "float32" else 2)
    small: Settings = {"kv_cache_bytes": 288 * per_token}
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompts = [prompt for prompt in PROMPTS if len(prompt) < 70]
    async with running_pair(model, sides=Sides(prefill, {**decode, **small}), max_num_seqs=4) as pair:
        asked = (pair.ask(f"many-{index}", prompt, sampling) for index, prompt in enumerate(prompts))
        answers = await asyncio.gather(*asked)
        counters = await pair.decode.call("counters")
        await pair.until_free()
    assert [len(tokens_of(first, rest)) for first, rest in answers] == [60] * len(prompts)
    assert counters["num_preemptions_total"] > 0


@parametrize(CUTS)
async def test_a_prefix_that_was_computed_here_does_not_cross(
    model: Path, prefill: Settings, decode: Settings
) -> None:
    """Another block size alone is the same KV: what the decode worker computed itself is used (law 7)."""
    async with running_pair(model, sides=Sides(prefill, decode)) as pair:
        local = EngineRequest(request_id="local", prompt_token_ids=[*SHARED, 9], sampling=GREEDY)
        await outputs_of(pair.decode, local)
        _, rest = await pair.ask("fetched", [*SHARED, 9, 10], GREEDY)
        counters = await pair.decode.call("counters")
    assert rest[0].num_cached_tokens == 96
    assert counters["transfer_blocks_total{transport=tcp}"] == 1


@parametrize(BOTH | KV_DTYPES)
async def test_rounded_kv_and_computed_kv_never_take_each_others_place(
    model: Path, prefill: Settings, decode: Settings
) -> None:
    """The decode worker computes a prompt, fetches it, computes it again, fetches it again: each finds its own only."""
    prompt = PROMPTS[0]

    async def ask(pair: EnginePair, name: str) -> list[int]:
        send, receive = pair.legs(name, prompt, GREEDY)
        return tokens_of(await outputs_of(pair.prefill, send), await outputs_of(pair.decode, receive))

    async def compute(pair: EnginePair, name: str) -> tuple[list[int], int | None]:
        request = EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=GREEDY)
        outputs = await outputs_of(pair.decode, request)
        return tokens_of(outputs), outputs[0].num_cached_tokens

    async with running_pair(model, sides=Sides(prefill, decode, connect=Shelf().connect)) as reference:
        expected = await ask(reference, "reference")
    async with running_pair(model, sides=Sides(prefill, decode)) as pair:
        needed, name = [], "transfer_converted_blocks_total"
        computed, num_cached = await compute(pair, "computed")
        for number in range(2):
            assert await ask(pair, f"fetched-{number}") == expected
            needed.append((await pair.decode.call("counters"))[name])
            again, num_cached = await compute(pair, f"again-{number}")
            assert (again, num_cached) == (computed, 150 - 150 % decode.get("block_size", 16))
    total = -(-150 // decode.get("block_size", 16))
    assert needed == [total, total + 1]


@parametrize(CUTS | BOTH)
async def test_a_damaged_source_is_one_clear_error(model: Path, prefill: Settings, decode: Settings) -> None:
    """Found in staging: no token of the decode leg, no block kept, and the same prompt goes through afterwards."""
    damage = partial(CorruptingReceiver, block_index=1)
    async with running_pair(model, damage, Sides(prefill, decode)) as pair:
        first, rest = await pair.ask("damaged", PROMPTS[0], GREEDY)
        assert len(tokens_of(first)) == 1
        assert tokens_of(rest) == []
        assert (rest[-1].finish_reason, rest[-1].error_kind) == (
            FinishReason.ERROR,
            ErrorKind.TRANSFER_FAILED,
        )
        assert "block 1 of transfer" in (rest[-1].error_message or "")
        assert (await pair.decode.call("counters"))["transfer_digest_mismatches_total"] == 2
        await pair.until_free()
        first, rest = await pair.ask("short", PROMPTS[6], GREEDY)
        assert len(tokens_of(first, rest)) == 20


@pytest.mark.parametrize(
    ("prefill", "decode", "named"),
    [
        (SMALL, {"block_size": 24}, "block_size: ours is 16, the peer's is 24 (neither is a multiple"),
        ({"dtype": "float16"}, FULL, "dtype: ours is float16, the peer's is float32 (only float32 and"),
    ],
)
async def test_what_cannot_be_bridged_is_refused_by_name(
    model: Path, prefill: Settings, decode: Settings, named: str
) -> None:
    """At the handshake, by the side that is dialed, before any block is reserved (law 10)."""
    async with running_pair(model, sides=Sides(prefill, decode)) as pair:
        _, rest = await pair.ask("refused", PROMPTS[0], GREEDY)
        assert rest[-1].error_kind == ErrorKind.INCOMPATIBLE
        assert named in (rest[-1].error_message or "")
        assert (await pair.decode.call("counters"))["transfer_needed_blocks_total"] == 0
        await pair.prefill.abort("refused", 0)
        await pair.until_free()


async def test_another_model_is_refused_whatever_its_dtype(model: Path, tmp_path: Path) -> None:
    """Equal weights in another dtype are one model; other weights in the same dtype are not."""
    other = make_checkpoint(tmp_path, "llama", seed=4)
    for dtype in (FULL, HALF):
        async with running_pair(model, sides=Sides(dtype, {"model": other})) as pair:
            _, rest = await pair.ask("refused", PROMPTS[0], GREEDY)
            assert rest[-1].error_kind == ErrorKind.INCOMPATIBLE
            assert "model_fingerprint: ours is " in (rest[-1].error_message or "")
            await pair.prefill.abort("refused", 0)
            await pair.until_free()
