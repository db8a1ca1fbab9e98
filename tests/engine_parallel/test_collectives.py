"""The collectives of a step of several ranks, and best tokens of a vocabulary of which each rank has a part."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed

from contract.sampling import SamplingParams
from engine.compute.best_tokens import BestOfRanks, TorchBestTokens
from engine.distributed.group import RankGroup
from engine.distributed.process_group import TorchRankGroup
from engine.models.linear import SummedProduct, joined, row_parallel
from tests.checkpoints import make_checkpoint
from tests.engine_compute.driver import Driver, greedy
from tests.engine_parallel.driver import SEEDED, RanksDriver, driven
from tests.fakes.engine.collectives import CountedGroup
from tests.fakes.engine.graphs import FakeDeviceForward, FakeDeviceGraphs
from tests.fakes.engine.local_ranks import groups_of_threads

dist: Any = distributed
CPU = torch.device("cpu")
PROMPTS = {"short": [3], "mid": [(7 * n) % 90 for n in range(9)], "long": [(11 * n) % 90 for n in range(21)]}
VOCAB_SIZE = 101
NUM_LAYERS = 2
HIDDEN_BYTES = 64 * 4
SUMS = {"sum": 2 * NUM_LAYERS + 1}
"""Two for each layer, and one for the embedding."""
BEST = {"highest": 1}
DRAWN = {"gather": 1, "share": 1}

STEPS: dict[str, tuple[list[SamplingParams], dict[str, int], dict[str, int]]] = {
    "greedy": ([greedy(), greedy()], BEST, {}),
    "drawn": ([SEEDED, SEEDED], DRAWN, DRAWN),
    "greedy beside drawn": ([greedy(), SEEDED], DRAWN, DRAWN),
    "log probabilities": ([greedy(logprobs=2), greedy()], DRAWN, DRAWN),
    "biased": ([greedy(logit_bias=((5, 3.0),)), greedy()], DRAWN, DRAWN),
    "penalties": ([greedy(presence_penalty=0.5), greedy()], DRAWN, DRAWN),
}
"""Rows; the collectives behind the sums, of a step as it is, and of one behind its graph, which finds best tokens anyway."""


def checkpoint(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    """Write a model whose vocabulary has padding on the last of two, three and four ranks."""
    tokens = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return make_checkpoint(folder, family, seed=5, **{**tokens, **overrides})


@pytest.mark.parametrize("make_forward", [FakeDeviceForward, FakeDeviceGraphs])
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("size", [2, 3])
def test_the_collectives_of_a_decode_step(tmp_path: Path, size: int, kind: str, make_forward: type) -> None:
    samplings, as_it_is, behind_its_graph = STEPS[kind]
    expected = SUMS | (BEST | behind_its_graph if make_forward is FakeDeviceGraphs else as_it_is)
    groups = [CountedGroup(group) for group in groups_of_threads(size)]
    with driven(RanksDriver(checkpoint(tmp_path), groups, make_forward, tensor_parallel_size=size)) as driver:
        for number, sampling in enumerate(samplings):
            driver.add(f"{number}", PROMPTS["mid"], sampling)
        driver.step(dict.fromkeys(driver.sequences, len(PROMPTS["mid"])))
        for group in groups:
            group.clear()
        driver.step(dict.fromkeys(driver.sequences, 1))
    num_rows = len(samplings)
    num_bytes = {
        "sum": SUMS["sum"] * num_rows * HIDDEN_BYTES,
        "highest": 8 * num_rows,
        "gather": num_rows * {2: 64, 3: 48}[size] * 4,
        "share": 2 * 8 * num_rows,
    }
    for group in groups:
        assert group.num_calls == expected
        assert group.num_bytes == {name: num_bytes[name] for name in expected}


def test_a_step_without_a_token_gathers_nothing(tmp_path: Path) -> None:
    """A chunk of a prompt that goes on; log probabilities of a prompt need whole logits, and no tokens are shared then."""
    groups = [CountedGroup(group) for group in groups_of_threads(2)]
    with driven(RanksDriver(checkpoint(tmp_path), groups)) as driver:
        for name, sampling, expected in (
            ("plain", greedy(), SUMS),
            ("prompt", greedy(prompt_logprobs=1), SUMS | {"gather": 1}),
        ):
            driver.add(name, PROMPTS["long"], sampling)
            for group in groups:
                group.clear()
            driver.step({name: 5})
            for group in groups:
                assert group.num_calls == expected


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_that_ranks_add_up_is_a_product_and_a_sum(has_bias: bool) -> None:
    """A small-batch product has a kernel of its own then, as on one rank; its weight is the layer's own."""
    groups = [CountedGroup(group) for group in groups_of_threads(2)]
    layers = [row_parallel(8, 5, has_bias, group) for group in groups]
    products = [joined(layer) for layer in layers]
    states = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))

    def computed(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        layer, product = layers[rank], products[rank]
        assert isinstance(product, SummedProduct)
        own = product.part(states[rank])
        return layer(states[rank]).detach(), product(states[rank]).detach(), product.total(own).detach()

    for layer, product, group, found in zip(layers, products, groups, on_ranks(2, computed), strict=True):
        assert isinstance(product, SummedProduct) and product.part.bias is None
        assert product.part.weight.data_ptr() == layer.weight.data_ptr()
        assert all(torch.equal(each, found[0]) for each in found)
        assert group.num_calls == {"sum": 3}


def on_ranks(size: int, action: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as threads:
        return [each.result(timeout=60) for each in [threads.submit(action, rank) for rank in range(size)]]


def groups_over_gloo(size: int) -> list[TorchRankGroup]:
    """Make the groups of ranks that are threads here and exchange through gloo."""
    store = dist.HashStore()
    return on_ranks(size, lambda rank: TorchRankGroup(CPU, rank, size, store, timedelta(seconds=60)))


def answers(driver: Driver, kinds: dict[str, SamplingParams], num_tokens: int = 6) -> dict[str, list[int]]:
    for name, prompt in PROMPTS.items():
        for kind, sampling in kinds.items():
            driver.add(f"{name} {kind}", prompt, sampling)
    return driver.generate(list(driver.sequences), num_tokens, 7)


def set_to_zero(folder: Path, *endings: str) -> None:
    """Set the weights with these endings to zero."""
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(endings):
            weight.zero_()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("kinds", [{"greedy": greedy()}, {"greedy": greedy(), "seeded": SEEDED}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_number_of_ranks_over_gloo_gives_the_answers_of_one(
    tmp_path: Path, dtype: str, kinds: dict[str, SamplingParams]
) -> None:
    """The vocabulary divides on none of them.

    In bfloat16, a sum rounds otherwise on each number of ranks, so the layers add nothing there.
    """
    folder = checkpoint(tmp_path)
    if dtype == "bfloat16":
        set_to_zero(folder, "o_proj.weight", "down_proj.weight")
    with driven(Driver(folder, dtype=dtype)) as one:
        expected = answers(one, kinds)
    for size in (2, 3, 4):
        groups = groups_over_gloo(size)
        with driven(RanksDriver(folder, groups, tensor_parallel_size=size, dtype=dtype)) as several:
            assert answers(several, kinds) == expected


@pytest.mark.parametrize("size", [2, 3, 4])
def test_equal_logits_on_several_ranks_give_the_lowest_token(tmp_path: Path, size: int) -> None:
    """All logits are 0, those of padding too."""
    folder = checkpoint(tmp_path)
    set_to_zero(folder, "model.norm.weight")
    with driven(RanksDriver(folder, tensor_parallel_size=size)) as driver:
        for found in answers(driver, {"greedy": greedy()}).values():
            assert set(found) == {0}


VALUES = st.sampled_from([-torch.inf, -2.0, -1.5, -0.0, 0.0, 1e-30, 1.5, 2.0, torch.inf, torch.nan])


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.data(),
)
def test_best_tokens_of_parts_are_those_of_the_whole(
    size: int, width: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Ties, both zeros, infinities and NaN on any rank; ranks without real columns; padding that would win."""
    num_columns = data.draw(st.integers(1, size * width))
    rows = data.draw(st.lists(st.lists(VALUES, min_size=num_columns, max_size=num_columns), max_size=3))
    whole = torch.tensor(rows, dtype=torch.float32).view(-1, num_columns).to(dtype)
    expected = [best_of(row) for row in whole.tolist()]
    padding = data.draw(st.sampled_from([torch.inf, torch.nan, 5.0]))
    padded = torch.full((len(whole), size * width), padding, dtype=dtype)
    padded[:, :num_columns] = whole
    for found in best_on(groups_of_threads(size), num_columns, list(torch.split(padded, width, dim=1))):
        assert found.tolist() == expected


@pytest.mark.parametrize("values", [(-0.0, 0.0), (0.0, -0.0), (-1.0, -1.0), (torch.nan, torch.nan)])
def test_equal_values_on_two_ranks_give_the_token_of_the_first(values: tuple[float, float]) -> None:
    """Both zeros are equal, and so are all NaN."""
    parts = [torch.tensor([[-2.0, value]]) for value in values]
    for found in best_on(groups_of_threads(2), 4, parts):
        assert found.tolist() == [[1, int(math.isfinite(values[0]))]]


def best_of(row: list[float]) -> list[int]:
    """Return the first NaN, or else the first of the highest numbers, and whether it is a finite one."""
    nans = [token for token, value in enumerate(row) if math.isnan(value)]
    token = nans[0] if nans else row.index(max(row))
    return [token, int(math.isfinite(row[token]))]


def best_on(groups: list[Any], num_columns: int, parts: list[Tensor]) -> list[Tensor]:
    """Return what each rank finds."""

    def find(rank: int) -> Tensor:
        group: RankGroup = groups[rank]
        best = torch.full((len(parts[rank]), 2), -1)
        BestOfRanks(group, num_columns, TorchBestTokens())(parts[rank], best)
        return best

    return on_ranks(len(groups), find)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_highest_of_all_ranks_over_gloo(size: int) -> None:
    """Element by element, of all 64 bits, on every rank."""
    groups = groups_over_gloo(size)
    values = torch.randint(-(2**62), 2**62, (size, 7), generator=torch.Generator().manual_seed(size))
    with ExitStack() as stack:
        for group in groups:
            stack.callback(group.close)
        for found in on_ranks(size, lambda rank: groups[rank].highest(values[rank].clone())):
            assert torch.equal(found, values.amax(dim=0))
