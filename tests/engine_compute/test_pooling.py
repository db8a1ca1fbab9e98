"""Embeddings equal those from transformers' hidden states, for any division into steps, on one rank and on two."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from contract.errors import InternalError
from contract.requests import PoolingParams
from engine.outputs import CachedRequestData, ModelRunnerOutput, SchedulerOutput
from tests.checkpoints import load_reference, make_checkpoint, reference_greedy
from tests.engine_compute.driver import Driver, add_cached
from tests.engine_parallel.driver import RanksDriver

PROMPT = [(37 * i + 11) % 256 for i in range(29)]
SHORT = [3, 1, 4]
Kind = Literal["last", "mean", "max"]
KINDS: tuple[Kind, ...] = ("last", "mean", "max")


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, seed=3)


@pytest.fixture(params=[Driver, RanksDriver])
def driver(request: pytest.FixtureRequest, folder: Path) -> Iterator[Driver]:
    made = request.param(folder)
    yield made
    made.executor.shutdown()


def expected(folder: Path, prompt: list[int], pooling: PoolingParams) -> Any:
    with torch.no_grad():
        states = load_reference(folder).model(torch.tensor([prompt])).last_hidden_state[0].double().numpy()
    vector = {"last": states[-1], "mean": states.mean(axis=0), "max": states.max(axis=0)}[
        pooling.pooling_type or ""
    ]
    return vector / np.linalg.norm(vector) if pooling.normalize else vector


def pooled(output: ModelRunnerOutput, name: str) -> list[float]:
    vector = output.pooler_output[output.req_id_to_index[name]]
    assert vector is not None
    return vector


def embed(driver: Driver, prompt: list[int], pooling: PoolingParams, chunk: int = 1000) -> list[float]:
    name = f"e{len(driver.sequences)}"
    driver.add(name, prompt, pooling=pooling)
    for start in range(0, len(prompt), chunk):
        output = driver.step({name: min(chunk, len(prompt) - start)})
        assert output.sampled_token_ids == [[]]
        if start + chunk < len(prompt):
            assert output.pooler_output == [None]
    return pooled(output, name)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers_whole_and_in_chunks(
    driver: Driver, folder: Path, kind: Kind, normalize: bool
) -> None:
    """A41."""
    pooling = PoolingParams(kind, normalize)
    for prompt in (PROMPT, SHORT):
        exact = expected(folder, prompt, pooling)
        for chunk in (1000, 7, 1):
            found = embed(driver, prompt, pooling, chunk)
            np.testing.assert_allclose(found, exact, rtol=2e-4, atol=2e-5)
            assert found == np.asarray(found, dtype=np.float32).tolist()


def test_beside_requests_that_sample(driver: Driver, folder: Path) -> None:
    """A41: one batch: embeddings of each kind, two of them in chunks, and an answer that is decoded."""
    answer = reference_greedy(load_reference(folder), SHORT, 4)
    last, mean, most = (PoolingParams(kind) for kind in KINDS)
    driver.add("g", SHORT)
    driver.add("last", PROMPT, pooling=last)
    driver.add("mean", PROMPT, pooling=mean)
    driver.add("max", PROMPT, pooling=most)
    first = driver.step({"mean": 10, "g": len(SHORT), "last": len(PROMPT), "max": 17})
    unfinished = [first.pooler_output[first.req_id_to_index[name]] for name in ("mean", "g", "max")]
    assert unfinished == [None, None, None]
    np.testing.assert_allclose(pooled(first, "last"), expected(folder, PROMPT, last), rtol=2e-4, atol=2e-5)
    rest = {"g": 1, "mean": len(PROMPT) - 10, "max": len(PROMPT) - 17}
    second = driver.step(rest, finished={"last"})
    np.testing.assert_allclose(pooled(second, "max"), expected(folder, PROMPT, most), rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(pooled(second, "mean"), expected(folder, PROMPT, mean), rtol=2e-4, atol=2e-5)
    for _ in range(2):
        assert driver.step({"g": 1}).pooler_output == []
    assert driver.sequences["g"].answer == answer


def resume(driver: Driver, name: str, num_computed: int) -> SchedulerOutput:
    """Return the step of a preempted request that computes the rest of its prompt in another request's blocks."""
    sequence, cached = driver.sequences[name], CachedRequestData()
    blocks = list(driver.sequences["done"].blocks)
    add_cached(cached, name, blocks, num_computed, resumed_with=sequence.tokens)
    count = len(sequence.tokens) - num_computed
    return SchedulerOutput(
        scheduled_cached_reqs=cached, num_scheduled_tokens={name: count}, total_num_scheduled_tokens=count
    )


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_in_the_middle(driver: Driver, folder: Path, kind: Kind) -> None:
    """A mean or a maximum starts again from nothing; the last token may use KV that another request has left."""
    pooling = PoolingParams(kind)
    driver.add("done", PROMPT)
    driver.add("e", PROMPT, pooling=pooling)
    driver.step({"done": len(PROMPT), "e": 13})
    again = resume(driver, "e", 20 if kind == "last" else 0)
    output = driver.executor.execute_model(again)
    np.testing.assert_allclose(pooled(output, "e"), expected(folder, PROMPT, pooling), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["mean", "max"])
def test_a_part_of_the_prompt_is_rejected(folder: Path, kind: Kind) -> None:
    driver = Driver(folder)
    driver.add("e", PROMPT, pooling=PoolingParams(kind), num_computed=4, blocks=[1])
    with pytest.raises(InternalError, match="misses its first 4 tokens"):
        driver.step({"e": len(PROMPT) - 4})
    driver.executor.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_nan_values_are_counted(folder: Path, kind: Kind) -> None:
    driver = Driver(folder)
    model = driver.runner._model.loaded
    assert model is not None
    embedding = model.model.get_parameter("model.embed_tokens.weight")
    embedding.data = embedding.data.clone()
    embedding.data[PROMPT[-1]] = float("nan")
    driver.add("bad", PROMPT, pooling=PoolingParams(kind))
    driver.add("good", SHORT, pooling=PoolingParams(kind))
    output = driver.step({"bad": len(PROMPT), "good": len(SHORT)})
    assert output.num_nans_in_logits == {"bad": 64}
    assert output.pooler_output[0] is None
    assert pooled(output, "good")
    driver.executor.shutdown()
