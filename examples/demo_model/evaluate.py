"""Measures held-out exact recall with transformers: ``python -m examples.demo_model.evaluate MODEL``.

Held out: prompts are made from random numbers that no training step uses. An answer counts when its
text is exactly ``key: value`` and then ends. Also the aims: repeating words, and sums of two digits.
"""

import argparse
import json
import random
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from examples.demo_model.data import DemoData
from examples.demo_model.words import NOUNS

HELD_OUT_SEED = 20_261_120
LENGTHS = (128, 512, 1500)
BATCH_TOKENS = 16_384


def answers(
    model: torch.nn.Module, tokenizer: Tokenizer, prompts: list[list[int]], new_tokens: int
) -> list[str]:
    """Return greedy answers to prompts of one length, up to the end token; ``…`` marks an answer that did not end."""
    texts = []
    num_rows = max(1, BATCH_TOKENS // len(prompts[0]))
    for start in range(0, len(prompts), num_rows):
        ids = torch.tensor(prompts[start : start + num_rows])
        output = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        for row in output[:, ids.shape[1] :].tolist():
            text, end, _ = tokenizer.decode(row, skip_special_tokens=False).partition("<|end|>")
            texts.append(text if end else text + "…")
    return texts


def recall(model: torch.nn.Module, tokenizer: Tokenizer, length: int, num_prompts: int) -> float:
    """Return the share of exact answers to prompts of ``length`` tokens."""
    data = DemoData(tokenizer)
    rng = np.random.default_rng([HELD_OUT_SEED, length])
    prompts = [data.recall_prompt(rng, length) for _ in range(num_prompts)]
    given = answers(model, tokenizer, [prompt.token_ids for prompt in prompts], 6)
    return sum(text == prompt.answer for text, prompt in zip(given, prompts, strict=True)) / num_prompts


def skill(model: torch.nn.Module, tokenizer: Tokenizer, turns: list[tuple[str, str]]) -> float:
    """Return the share of exact answers to (question, answer) turns."""
    right = 0
    for ask, say in turns:
        ids = tokenizer.encode(
            f"<|bos|><|user|>\n{ask}<|end|>\n<|assistant|>\n", add_special_tokens=False
        ).ids
        right += answers(model, tokenizer, [ids], 24) == [say]
    return right / len(turns)


def evaluate(folder: Path, num_prompts: int) -> dict[str, float]:
    """Return all measures of the model in ``folder``, by name."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    shares = {f"recall_{length}": recall(model, tokenizer, length, num_prompts) for length in LENGTHS}
    rng = random.Random(HELD_OUT_SEED)
    lists = [" ".join(rng.sample(NOUNS, rng.randint(2, 8))) for _ in range(50)]
    shares["repeat"] = skill(model, tokenizer, [(f"Repeat: {words}", words) for words in lists])
    sums = [(a, b) for a in range(10) for b in range(10)]
    shares["sums"] = skill(
        model, tokenizer, [(f"What is {a} + {b}?", f"{a} + {b} = {a + b}") for a, b in sums]
    )
    return shares


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--num-prompts", type=int, default=400)
    arguments = parser.parse_args()
    print(json.dumps(evaluate(arguments.model, arguments.num_prompts), indent=2))


if __name__ == "__main__":
    main()
