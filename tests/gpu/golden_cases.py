"""Requests whose tokens are equal on every device, and comparisons that fail if nothing was compared."""

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.client import InProcessClient
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from tests.engine_pair import Sides, outputs_of, running_pair, tokens_of

NUM_ANSWERS = 16
MAX_STEP_TOKENS = 256
"""The longest prompt takes three steps, and the last of them enough blocks to be handed over layer group by layer group."""
LENGTHS = (1, 15, 16, 17, 100, 333, 700)
MAX_LENGTH = 1024
_POOL_BYTES = 64 * 2**20

Tokens = list[list[int]]


def make_model(folder: Path, family: str, **overrides: Any) -> Path:
    """Write a tiny model with room for the longest request and with several groups of layers."""
    sizes = {"max_position_embeddings": MAX_LENGTH, "num_hidden_layers": 4, **overrides}
    return make_checkpoint(folder, family, seed=4, **sizes)


def requests() -> list[EngineRequest]:
    """Return a request for each of LENGTHS: every other one is greedy, the others are sampled with a seed."""
    rng = random.Random(17)
    return [
        EngineRequest(
            request_id=f"gpu-{index}",
            prompt_token_ids=[rng.randrange(5, 250) for _ in range(length)],
            sampling=SamplingParams(
                temperature=float(index % 2), seed=index, max_tokens=NUM_ANSWERS, ignore_eos=True
            ),
        )
        for index, length in enumerate(LENGTHS)
    ]


async def tokens_of_engine(model: Path, *, at_once: bool = True, **settings: Any) -> Tokens:
    """Return one engine's tokens. at_once: all requests at the same time, so that steps are batches."""
    client = await InProcessClient.start(EngineSettings(model=model, **_settings(settings)))
    try:
        if at_once:
            outputs = await asyncio.gather(*(outputs_of(client, request) for request in requests()))
        else:
            outputs = [await outputs_of(client, request) for request in requests()]
        return [tokens_of(own) for own in outputs]
    finally:
        await client.shutdown()


async def scores_of_engine(model: Path, **settings: Any) -> list[float]:
    """Return the log probabilities of the tokens of the longest prompt, from its second one on."""
    client = await InProcessClient.start(EngineSettings(model=model, **_settings(settings)))
    try:
        asked = requests()[-1]
        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        outputs = await outputs_of(client, msgspec.structs.replace(asked, sampling=sampling))
        return [each.logprob for output in outputs for each in output.prompt_logprobs or ()]
    finally:
        await client.shutdown()


async def tokens_of_pair(
    model: Path, transport: str, decode: Mapping[str, Any] | None = None, **settings: Any
) -> Tokens:
    """Return the tokens of a prefill and a decode engine, one request after another. decode: settings of that one alone."""
    sides = Sides(decode=dict(decode or {}), transport=transport)
    async with running_pair(model, sides=sides, **_settings(settings)) as pair:
        found = []
        for request in requests():
            first, rest = await pair.ask(request.request_id, request.prompt_token_ids, request.sampling)
            found.append(tokens_of(first, rest))
        return found


def assert_same_tokens(found: Tokens, expected: Tokens, what: object = "") -> None:
    """Assert that the answers are equal. Answers that are not whole on either side fail: nothing would be compared."""
    for name, answers in (("found", found), ("expected", expected)):
        assert [len(answer) for answer in answers] == [NUM_ANSWERS] * len(LENGTHS), f"{what}: {name}"
    for length, own, right in zip(LENGTHS, found, expected, strict=True):
        assert own == right, f"{what}: the prompt of {length} tokens"


def share_of_equal(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """Return the share of answer tokens that are equal, place by place. Raises ValueError for answers that are not whole."""
    pairs = [
        pair for one, other in zip(found, expected, strict=True) for pair in zip(one, other, strict=True)
    ]
    if len(pairs) != NUM_ANSWERS * len(LENGTHS):
        raise ValueError(f"{len(pairs)} tokens are compared, and {NUM_ANSWERS * len(LENGTHS)} were asked for")
    return sum(one == other for one, other in pairs) / len(pairs)


def distance(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the root mean square of the differences. Raises ValueError if there are none, or the lengths differ."""
    squares = [(one - other) ** 2 for one, other in zip(found, expected, strict=True)]
    if not squares:
        raise ValueError("nothing is compared")
    return math.sqrt(sum(squares) / len(squares))


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    fields = {
        "dtype": "float32",
        "kv_cache_bytes": _POOL_BYTES,
        "max_num_seqs": 8,
        "max_num_batched_tokens": MAX_STEP_TOKENS,
    }
    return fields | given
