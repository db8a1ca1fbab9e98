"""Ranks that do not divide a model's heads, width or vocabulary: copies of KV heads and padding, and the same answers."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.layout import heads_of_rank
from contract.sampling import SamplingParams
from engine.distributed.group import columns_of_all
from engine.models.config import DecoderConfig, Head
from engine.models.families import decoder_tensors, llama
from engine.models.loading import load
from engine.models.sharding import config_of_rank, part_of
from tests.checkpoints import make_checkpoint
from tests.engine_compute.driver import Driver, greedy
from tests.engine_parallel.driver import SEEDED, RanksDriver, driven
from tests.fakes.engine.local_ranks import Exchange, LocalRankGroup

PROMPTS = {"short": [3], "mid": [(7 * n) % 90 for n in range(9)], "long": [(11 * n) % 90 for n in range(21)]}
NUM_TOKENS = 6
MODEL_WIDE = SamplingParams(temperature=1.5, seed=3, max_tokens=1000)
"""Draws from the whole vocabulary, so that a token of padding would be drawn too."""
SHAPES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "two KV heads on four ranks": (4, "llama", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    "six query heads": (4, "qwen2", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "one KV head": (2, "qwen3", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "one KV head on three ranks": (3, "llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "three KV heads on two ranks": (2, "qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3}),
    "more ranks than heads": (5, "llama", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "odd vocabulary": (2, "llama", {"vocab_size": 32003}),
    "odd width and biases": (3, "llama", {"intermediate_size": 98, "mlp_bias": True, "attention_bias": True}),
}


def checkpoint(folder: Path, family: str, **overrides: Any) -> Path:
    """Write a model of a small vocabulary, so that padding is a large part of it."""
    tokens = {"vocab_size": 101, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return make_checkpoint(folder, family, seed=5, **{**tokens, **overrides})


def answers(driver: Driver) -> dict[str, list[int]]:
    for name, prompt in PROMPTS.items():
        for kind, sampling in (("greedy", None), ("seeded", SEEDED), ("wide", MODEL_WIDE)):
            driver.add(f"{name} {kind}", prompt, sampling)
    return driver.generate(list(driver.sequences), NUM_TOKENS, 7)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_answers_are_those_of_one_rank(tmp_path: Path, shape: str) -> None:
    size, family, overrides = SHAPES[shape]
    folder = checkpoint(tmp_path, family, **overrides)
    with driven(Driver(folder)) as one, driven(RanksDriver(folder, tensor_parallel_size=size)) as several:
        assert answers(several) == answers(one)


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(2, 5),
    st.integers(90, 110),
    st.integers(1, 40),
    st.sampled_from(["llama", "qwen2", "qwen3"]),
    st.booleans(),
)
def test_any_sizes_on_any_number_of_ranks(
    num_kv_heads: int, of_head: int, size: int, vocab_size: int, width: int, family: str, is_tied: bool
) -> None:
    with TemporaryDirectory() as name:
        folder = checkpoint(
            Path(name),
            family,
            num_attention_heads=num_kv_heads * of_head,
            num_key_value_heads=num_kv_heads,
            hidden_size=8 * num_kv_heads * of_head,
            vocab_size=vocab_size,
            intermediate_size=width,
            tie_word_embeddings=is_tied,
        )
        with driven(Driver(folder)) as one, driven(RanksDriver(folder, tensor_parallel_size=size)) as several:
            assert answers(several) == answers(one)


def test_each_rank_holds_a_copy_of_its_head(tmp_path: Path) -> None:
    """Copies count for each rank: its blocks hold one head, and the pool has as many as its bytes allow."""
    folder = checkpoint(tmp_path, "llama", num_attention_heads=8, num_key_value_heads=2)
    with driven(Driver(folder)) as one, driven(RanksDriver(folder, tensor_parallel_size=4)) as four:
        for driver in (one, four):
            driver.add("a", PROMPTS["long"])
            driver.generate(["a"], 3, chunk=9)
        assert isinstance(four, RanksDriver)
        assert four.executor.layout.num_kv_heads == 1
        assert four.num_blocks == one.num_blocks // 2
        assert four.executor.model_info.num_kv_heads == 2
        blocks = four.sequences["a"].blocks
        whole = one.runner.memory.pool[blocks]
        for rank, runner in enumerate(four.ranks.runners):
            head = rank // 2
            torch.testing.assert_close(runner.memory.pool[blocks], whole[:, :, :, head : head + 1])


def test_padding_is_zero_and_never_a_token(tmp_path: Path) -> None:
    """The last of four ranks has 5 of 101 tokens and 27 of padding; log probabilities are over 101 tokens."""
    folder = checkpoint(tmp_path, "llama")
    groups = [LocalRankGroup(rank, Exchange(4)) for rank in range(4)]
    parts = [load(folder, "auto", None, torch.device("cpu"), group).model for group in groups]
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        tensors = [dict(part.named_parameters())[name] for part in parts]
        assert [len(tensor) for tensor in tensors] == [32] * 4
        assert not tensors[-1][5:].any() and tensors[-1][:5].any(dim=-1).all()
    outputs = []
    for make in (Driver, partial(RanksDriver, tensor_parallel_size=4)):
        with driven(make(folder)) as driver:
            driver.add("a", PROMPTS["long"], greedy(logprobs=101))
            outputs.append(driver.step({"a": len(PROMPTS["long"])}).logprobs)
    one, four = outputs
    assert one is not None and four is not None
    assert four.logprob_token_ids[0][0] == one.logprob_token_ids[0][0]
    assert sorted(four.logprob_token_ids[0][1:]) == list(range(101))
    assert four.logprobs[0] == pytest.approx(one.logprobs[0], abs=1e-4)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 12), st.integers(1, 300), st.integers(1, 50))
def test_parts_are_the_whole_once(
    num_kv_heads: int, of_head: int, size: int, vocab_size: int, width: int
) -> None:
    """Each row of each tensor is on one rank, or, of keys and values, on those that hold the head; the rest is zero."""
    config = llama(
        {
            "vocab_size": vocab_size,
            "hidden_size": 4,
            "intermediate_size": width,
            "num_hidden_layers": 1,
            "num_attention_heads": num_kv_heads * of_head,
            "num_key_value_heads": num_kv_heads,
            "head_dim": 2,
            "max_position_embeddings": 8,
        }
    )
    groups = [LocalRankGroup(rank, Exchange(size)) for rank in range(size)]
    of_rank = config_of_rank(config, size)
    assert of_rank.num_heads % of_rank.num_kv_heads == 0
    for name, shape in decoder_tensors(config, Head.OWN).items():
        whole = torch.arange(1, torch.Size(shape).numel() + 1).view(shape)
        found = [taken(name, config, group, whole) for group in groups]
        if "norm" in name:
            continue
        rows = torch.cat(found, dim=dim_of(name)).flatten()
        numbers, counts = torch.unique(rows[rows > 0], return_counts=True)
        assert torch.equal(numbers, whole.flatten())
        is_copied = "k_proj" in name or "v_proj" in name
        assert is_copied or bool((counts == 1).all())


def dim_of(name: str) -> int:
    return int("o_proj" in name or "down_proj" in name)


def taken(name: str, config: DecoderConfig, group: LocalRankGroup, whole: torch.Tensor) -> torch.Tensor:
    part = part_of(name, config, group)
    if part is None:
        return whole
    dim = dim_of(name)
    assert part.whole_shape(
        torch.Size(part.size if at == dim else n for at, n in enumerate(whole.shape))
    ) == list(whole.shape)
    return part.assemble(lambda own: whole[(slice(None),) * dim + (own,)])


@given(st.integers(1, 5), st.integers(1, 7), st.data())
def test_gathered_columns_end_at_the_vocabulary(num_ranks: int, width: int, data: st.DataObject) -> None:
    num_columns = data.draw(st.integers(1, num_ranks * width))
    whole = torch.arange(2 * num_ranks * width).view(2, -1)
    gathered = columns_of_all(torch.split(whole, width, dim=1), num_columns)
    assert torch.equal(gathered, whole[:, :num_columns]) and gathered.is_contiguous()


def test_neighbours_hold_the_same_head() -> None:
    assert [list(heads_of_rank(2, 4, rank)) for rank in range(4)] == [[0], [0], [1], [1]]
    assert [list(heads_of_rank(3, 2, rank)) for rank in range(2)] == [[0, 1], [1, 2]]
    assert [list(heads_of_rank(8, 2, rank)) for rank in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
