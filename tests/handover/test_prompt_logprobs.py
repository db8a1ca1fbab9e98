"""Log probabilities of a prompt's own tokens: those of transformers, whatever the chunks, the cache and the hand-over."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from contract.outputs import EngineOutput, TokenLogprobs
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.client import InProcessClient
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from tests.engine_pair import outputs_of, running_pair

PROMPT = [random.Random(4).randrange(5, 250) for _ in range(41)]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=3, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", seed=3)


@pytest.fixture(scope="module")
def expected(model: Path) -> torch.Tensor:
    """Log probabilities ``[len(PROMPT) - 1, vocab_size]`` behind each token of the prompt but the last."""
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([PROMPT])).logits[0, :-1]
    return logits.log_softmax(dim=-1)


def told_by(outputs: list[EngineOutput]) -> list[TokenLogprobs]:
    """Return the prompt logprobs, which only the first output has."""
    first, *others = outputs
    assert all(output.prompt_logprobs is None for output in others)
    assert first.prompt_logprobs is not None
    return first.prompt_logprobs


def check(told: list[TokenLogprobs], expected: torch.Tensor) -> None:
    assert [one.token_id for one in told] == PROMPT[1:]
    for one, row in zip(told, expected, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=2e-4)
        assert one.rank == int((row > row[one.token_id]).sum()) + 1
        best = row.topk(3)
        assert one.top_token_ids == tuple(best.indices.tolist())
        assert one.top_logprobs == pytest.approx(best.values.tolist(), abs=2e-4)


def request(name: str, **fields: Any) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=PROMPT, **{"sampling": SAMPLING, **fields})


async def start(model: Path, **settings: Any) -> InProcessClient:
    small = {"model": model, "dtype": "float32", "kv_cache_bytes": 16 * 2**20, **settings}
    return await InProcessClient.start(EngineSettings(**small))


@pytest.mark.parametrize("chunk", [7, 16, 4096])
async def test_in_chunks_and_with_a_warm_cache(model: Path, expected: torch.Tensor, chunk: int) -> None:
    engine = await start(model, max_num_batched_tokens=chunk)
    try:
        for name in ("cold", "warm"):
            check(told_by(await outputs_of(engine, request(name))), expected)
        counters = await engine.call("counters")
        assert counters["prompt_tokens_total"] == 2 * len(PROMPT), "nothing may be skipped"
        plain = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        without = await outputs_of(engine, request("plain", sampling=plain))
        assert without[0].prompt_logprobs is None and without[0].num_cached_tokens == 32
    finally:
        await engine.shutdown()


async def test_over_the_hand_over_they_come_with_the_first_token_from_the_prefill_worker(
    model: Path, expected: torch.Tensor
) -> None:
    async with running_pair(model, max_num_batched_tokens=16) as pair:
        for name in ("cold", "warm"):
            sent, received = await pair.ask(name, PROMPT, SAMPLING)
            check(told_by(sent), expected)
            assert all(output.prompt_logprobs is None for output in received)
        sent, _ = await pair.ask("several", PROMPT, SAMPLING, num_choices=2)
        for choice in (0, 1):
            check(told_by([output for output in sent if output.choice == choice]), expected)
        await pair.until_free()


@pytest.mark.parametrize("chunk", [4, 12])
async def test_a_request_that_loses_its_blocks_tells_them_once_and_right(
    model: Path, expected: torch.Tensor, chunk: int
) -> None:
    """Six blocks, three for each of two; the first one needs a fourth when the other is in its prompt, or behind."""
    engine = await start(model)
    block_bytes = engine.info.layout.block_bytes
    await engine.shutdown()
    engine = await start(
        model, kv_cache_bytes=7 * block_bytes, max_model_len=72, max_num_batched_tokens=chunk
    )
    try:
        sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        first = EngineRequest(request_id="first", prompt_token_ids=PROMPT[::-1], sampling=sampling)
        begun = asyncio.create_task(outputs_of(engine, first))
        await asyncio.sleep(0)  # both are there before the first one has its token
        fields = {name: getattr(SAMPLING, name) for name in SamplingParams.__struct_fields__}
        later = request("later", sampling=SamplingParams(**{**fields, "max_tokens": 20}))
        check(told_by(await outputs_of(engine, later)), expected)
        await begun
        assert (await engine.call("counters"))["num_preemptions_total"] > 0
    finally:
        await engine.shutdown()
