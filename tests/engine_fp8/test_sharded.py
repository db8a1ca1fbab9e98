"""A model with FP8 weights on two ranks: each has its part of weights and scales, and the answers are those of one."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.loading import load
from tests.checkpoints import make_checkpoint
from tests.engine_compute.driver import Driver
from tests.engine_compute.test_equals_transformers import NUM_TOKENS, PROMPTS
from tests.engine_parallel.driver import RanksDriver
from tests.fakes.engine.local_ranks import Exchange, LocalRankGroup
from tests.fp8_checkpoints import FIXED, TOKEN, make_fp8, quantization

CPU = torch.device("cpu")
BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
WHOLE = ("norm.weight", "o_proj.bias", "o_proj.weight_scale", "down_proj.weight_scale", "input_scale")


def parameters(folder: Path, way: str, rank: int | None = None) -> dict[str, Tensor]:
    group = None if rank is None else LocalRankGroup(rank, Exchange(2))
    return dict(load(folder, "auto", None, CPU, group, way).model.named_parameters())


@pytest.mark.parametrize("way", ["on", "off"])
@pytest.mark.parametrize(("strategy", "inputs"), [("channel", TOKEN), ("tensor", FIXED)])
def test_the_parts_of_all_ranks_are_the_whole(
    tmp_path: Path, way: str, strategy: str, inputs: dict[str, Any]
) -> None:
    source = make_checkpoint(tmp_path / "source", attention_bias=True)
    folder = make_fp8(source, tmp_path / "fp8", quantization(strategy, inputs))
    whole = parameters(folder, way)
    ranks = [parameters(folder, way, rank) for rank in range(2)]
    assert any(name.endswith("weight_scale") for name in whole) == (way == "on")
    for name, tensor in whole.items():
        parts = [rank[name] for rank in ranks]
        assert all(part.dtype == tensor.dtype for part in parts)
        if name.endswith(WHOLE):
            assert all(torch.equal(part.float(), tensor.float()) for part in parts)
        else:
            joined = torch.cat([part.float() for part in parts], 1 if name.endswith(BY_COLUMNS) else 0)
            assert torch.equal(joined, tensor.float())


@pytest.mark.parametrize(
    ("way", "inputs"), [("off", TOKEN), ("on", FIXED)], ids=["converted", "multiplied by fixed scales"]
)
def test_two_ranks_give_the_answers_of_one(tmp_path: Path, way: str, inputs: dict[str, Any]) -> None:
    """With a scale of each token they need not: each rank quantises its part of the token by the part's own scale."""
    assert_answers_of_one(make_checkpoint(tmp_path / "source", seed=3, attention_bias=True), 2, way, inputs)


@pytest.mark.parametrize("way", ["off", "on"])
def test_copies_of_heads_and_padding_have_scales(tmp_path: Path, way: str) -> None:
    """Four ranks hold two KV heads twice, half of them a query head of padding, and the last one some width of padding."""
    source = make_checkpoint(
        tmp_path / "source",
        seed=3,
        attention_bias=True,
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=120,
    )
    assert_answers_of_one(source, 4, way, FIXED)


def assert_answers_of_one(source: Path, size: int, way: str, inputs: dict[str, Any]) -> None:
    folder = make_fp8(source, source.parent / "fp8", quantization("channel", inputs))
    answers = []
    for make in (Driver, partial(RanksDriver, tensor_parallel_size=size)):
        driver = make(folder, fp8_products=way)
        try:
            for name, prompt in PROMPTS.items():
                driver.add(name, prompt)
            answers.append(driver.generate(list(PROMPTS), NUM_TOKENS, 7))
        finally:
            driver.executor.shutdown()
    assert answers[0] == answers[1]
    assert len({tuple(answer) for answer in answers[0].values()}) == len(PROMPTS)
