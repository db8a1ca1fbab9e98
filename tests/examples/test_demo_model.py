"""The demo model: its data, its reproducible and resumable training, and its recall."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from examples.demo_model.data import DemoData
from examples.demo_model.evaluate import evaluate
from examples.demo_model.tokenizer import train_tokenizer
from examples.demo_model.train import Phase, train

NUM_STEPS = 16


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer()


def test_the_shipped_tokenizer_is_the_trained_one(tokenizer: Tokenizer, demo_model: Path) -> None:
    """Training the tokenizer again gives the vocabulary and merges of the shipped file."""
    shipped = json.loads((demo_model / "tokenizer.json").read_text())
    assert json.loads(tokenizer.to_str())["model"] == shipped["model"]


@pytest.mark.parametrize("num_tokens", [64, 128, 512, 1500])
def test_recall_prompts_are_what_they_say(tokenizer: Tokenizer, num_tokens: int) -> None:
    """Exactly so many tokens, the same from text, and the answer's value lies in the named block, for every block."""
    data, rng = DemoData(tokenizer), np.random.default_rng(num_tokens)
    for block in range((num_tokens - 15) // 16):
        prompt = data.recall_prompt(rng, num_tokens, block)
        assert len(prompt.token_ids) == num_tokens
        text = tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False).ids == prompt.token_ids
        value = tokenizer.encode(prompt.answer.partition(":")[2]).ids
        assert value[0] in prompt.token_ids[block * 16 : block * 16 + 16]
        assert f"\n{prompt.answer}\n" in text


def test_a_block_without_an_answer_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="block 99 contains no answer"):
        DemoData(tokenizer).recall_prompt(np.random.default_rng(0), 128, 99)


def test_batches_depend_on_seed_and_step_alone(tokenizer: Tokenizer) -> None:
    data = DemoData(tokenizer)
    ids, weights = data.batch(7, 3, 4, 128)
    data.batch(7, 4, 4, 128)
    again, weights_again = DemoData(tokenizer).batch(7, 3, 4, 128)
    assert np.array_equal(ids, again)
    assert np.array_equal(weights, weights_again)
    assert not np.array_equal(ids, data.batch(8, 3, 4, 128)[0])


@pytest.mark.slow
def test_training_is_reproducible_and_resumes(tmp_path: Path) -> None:
    """16 steps at once, and 8 steps that are resumed for 8 more: the same losses, the same weights."""
    small = (Phase(10, 4, 64), Phase(6, 2, 128))
    whole = train(tmp_path / "whole", 7, NUM_STEPS, save_every=1000, curriculum=small)
    first = train(tmp_path / "halves", 7, NUM_STEPS // 2, save_every=1000, curriculum=small)
    second = train(tmp_path / "halves", 7, NUM_STEPS, save_every=1000, curriculum=small)
    assert first + second == whole
    assert whole[-1] < whole[0]
    states = [
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["model"]
        for name in ("whole", "halves")
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_held_out_recall(demo_model: Path) -> None:
    """A tenth of the benchmark's prompts: at least 95 % exact at 128 and 512 tokens."""
    shares = evaluate(demo_model, 40)
    assert shares["recall_128"] >= 0.95
    assert shares["recall_512"] >= 0.95
