"""The scripted model repeats its script exactly, however it is computed, and detects any damaged KV."""

import asyncio
import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import SettingError
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.client import InProcessClient
from engine.models.loading import load
from engine.models.scripted import write_scripted_model
from engine.models.scripted_config import ScriptTokens
from engine.settings import EngineSettings
from tests.engine_compute.driver import Driver, Sequence, greedy
from tests.engine_pair import outputs_of, tokens_of
from tests.fakes.engine.local_ranks import Exchange, LocalRankGroup

BEGIN, END, ANSWER, LOST = 3, 1, 4, 5
TOKENS = ScriptTokens(begin=BEGIN, answer=ANSWER, lost=LOST)
VOCAB_SIZE = 300


def write(folder: Path, max_model_len: int = 512) -> Path:
    return write_scripted_model(
        folder, TOKENS, vocab_size=VOCAB_SIZE, eos_token_id=END, max_model_len=max_model_len
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write(tmp_path_factory.mktemp("scripted"))


def random_script(rng: random.Random, longest: int = 120) -> list[int]:
    return [rng.randrange(6, VOCAB_SIZE) for _ in range(rng.randrange(1, longest))]


def prompt_of(rng: random.Random, script: list[int]) -> list[int]:
    """Return a conversation in which only the last script counts."""
    earlier = random_script(rng, 30)
    return [0, BEGIN, *earlier, END, ANSWER, *earlier, END, BEGIN, *script, END, ANSWER]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("block_size", "chunk"), [(1, 7), (4, 1), (4, 1000), (16, 40), (32, 64)])
def test_random_scripts_are_repeated_exactly(model: Path, dtype: str, block_size: int, chunk: int) -> None:
    rng = random.Random(block_size * 1000 + chunk)
    driver = Driver(model, block_size=block_size, dtype=dtype)
    scripts = {f"r{index}": random_script(rng) for index in range(4)}
    for name, script in scripts.items():
        driver.add(name, prompt_of(rng, script))
    found = driver.generate(list(scripts), 120, chunk=chunk)
    for name, script in scripts.items():
        assert found[name][: len(script) + 1] == [*script, END], name


@pytest.mark.parametrize(
    "prompt", [[0, 7, 8], [0, BEGIN, 7, END], [0, 7, END, ANSWER], [0, ANSWER, BEGIN, 7, END]]
)
def test_without_a_script_the_answer_is_lost(model: Path, prompt: list[int]) -> None:
    driver = Driver(model)
    driver.add("a", prompt)
    assert driver.generate(["a"], 2) == {"a": [LOST, LOST]}


SCRIPT = [7, 299, 8, 64, 128]
PROMPT = [0, 9, BEGIN, *SCRIPT, END, ANSWER]
"""Three blocks of four positions."""


def cached_prompt(folder: Path) -> tuple[Driver, list[int]]:
    """Return a rank on which all of PROMPT except its last token is computed, and the blocks."""
    driver = Driver(write(folder, max_model_len=31), dtype="float32", block_size=4)
    driver.add("first", PROMPT)
    driver.step({"first": len(PROMPT) - 1})
    return driver, driver.sequences["first"].blocks


def answer_from(driver: Driver, blocks: list[int]) -> list[int]:
    """Return the answer of a request that finds its prompt in ``blocks``."""
    driver.sequences["again"] = Sequence(
        list(PROMPT), len(PROMPT), greedy(), num_computed=len(PROMPT) - 1, blocks=list(blocks)
    )
    answer = driver.generate(["again"], len(SCRIPT) + 1)["again"]
    driver.step({}, finished={"again"})
    return answer


def test_one_flipped_value_changes_the_answer(tmp_path: Path) -> None:
    """Flips values of layer 0, key bits of the script's begin, and all of layer 1 at the answer's tokens."""
    driver, blocks = cached_prompt(tmp_path)
    script_places = range(PROMPT.index(BEGIN) + 1, len(PROMPT) - 1)
    num_position_bits, num_code_bits = 5, 9
    flags = range(num_position_bits, num_position_bits + 2)
    begin = PROMPT.index(BEGIN)
    places = [
        *product([0], [1], range(len(PROMPT) - 1), range(num_position_bits)),
        *product([0], [0], range(begin, len(PROMPT) - 1), flags[:1]),
        *product([0], [1], [begin], flags[:1]),
        *product([1], [0], script_places, range(num_position_bits + 1)),
        *product([1], [1], script_places, range(num_code_bits)),
    ]
    assert answer_from(driver, blocks) == [*SCRIPT, END]
    for layer, kind, position, place in places:
        values = driver.runner.memory.layers[layer][blocks[position // 4], kind, 0, position % 4]
        values[place] = -values[place]
        assert answer_from(driver, blocks) != [*SCRIPT, END], (layer, kind, position, place)
        values[place] = -values[place]
    assert answer_from(driver, blocks) == [*SCRIPT, END]


def test_an_empty_or_exchanged_block_changes_the_answer(tmp_path: Path) -> None:
    """In both layers or in one, as if a copy had skipped it."""
    driver, blocks = cached_prompt(tmp_path)
    pool = driver.runner.memory
    for block, layers in product(blocks[:2], ([0], [1], [0, 1])):
        for other in (torch.zeros(()), None):
            kept = [pool.layers[layer][block].clone() for layer in layers]
            for layer in layers:
                pool.layers[layer][block] = (
                    pool.layers[layer][blocks[1 - blocks.index(block)]] if other is None else other
                )
            assert answer_from(driver, blocks) != [*SCRIPT, END], (block, layers, other)
            for layer, whole in zip(layers, kept, strict=True):
                pool.layers[layer][block] = whole
    assert answer_from(driver, blocks) == [*SCRIPT, END]


async def test_in_an_engine_that_chunks_caches_and_preempts(model: Path) -> None:
    """Eight answers at once, sampled at a temperature; then the same prompts from the cache."""
    rng = random.Random(5)
    scripts = [random_script(rng, 150) for _ in range(8)]
    prompts = [prompt_of(rng, script) for script in scripts]
    block_bytes = 2 * 2 * 12 * 8 * 4
    settings: dict[str, Any] = {"block_size": 8, "max_num_batched_tokens": 24, "num_threads": 1}
    client = await InProcessClient.start(
        EngineSettings(model=model, kv_cache_bytes=80 * block_bytes, **settings)
    )
    sampling = SamplingParams(temperature=1.3, seed=3, max_tokens=200)

    async def ask(name: str) -> list[list[int]]:
        requests = [
            EngineRequest(
                request_id=f"{name}-{index}",
                prompt_token_ids=prompt,
                sampling=sampling,
                eos_token_ids=(END,),
            )
            for index, prompt in enumerate(prompts)
        ]
        return list(
            map(tokens_of, await asyncio.gather(*(outputs_of(client, request) for request in requests)))
        )

    try:
        for name in ("cold", "warm"):
            assert await ask(name) == [[*script, END] for script in scripts]
        counters = await client.call("counters")
        assert counters["num_preemptions_total"] > 0
    finally:
        await client.shutdown()


def test_it_runs_on_one_rank_only(model: Path) -> None:
    group = LocalRankGroup(1, Exchange(2))
    with pytest.raises(SettingError, match="one rank only") as caught:
        load(model, "auto", None, torch.device("cpu"), group)
    assert caught.value.param == "tensor_parallel_size"


def test_a_folder_without_script_tokens_is_rejected(tmp_path: Path) -> None:
    config = write(tmp_path) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "script_tokens": {"begin": 3}}))
    with pytest.raises(SettingError, match=r"script_tokens is .*begin, answer, lost"):
        load(tmp_path, "auto", None, torch.device("cpu"))
