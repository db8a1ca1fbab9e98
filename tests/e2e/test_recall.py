"""The demo model's recall through the hand-over equals its recall in transformers, block by block."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from examples.demo_model.data import DemoData, RecallPrompt
from examples.demo_model.evaluate import answers
from protos import inference_pb2 as pb
from tests.service import generate_all, running_service

NUM_TOKENS = 512
NEW_TOKENS = 6

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


def one_prompt_a_block(tokenizer: Tokenizer) -> list[RecallPrompt]:
    data, rng = DemoData(tokenizer), np.random.default_rng(31)
    return [data.recall_prompt(rng, NUM_TOKENS, block=block) for block in range(NUM_TOKENS // 16 - 1)]


async def recall_by_service(folder: Path, prompts: list[RecallPrompt], *arguments: str) -> list[str]:
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    requests = [
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt.token_ids), sampling=sampling)
        for prompt in prompts
    ]
    async with running_service(folder, *arguments) as service:
        given = await generate_all(service.grpc, requests, 8)
    return [answer.text for answer in given]


POOLS = [
    ("--prefill", "1", "--decode", "1", "--transport", "tcp"),
    ("--prefill", "1", "--decode", "1", "--transport", "shm"),
    ("--prefill", "2", "--decode", "2", "--both", "1"),
]


@pytest.mark.parametrize("arguments", POOLS, ids=["tcp", "shm", "mixed"])
def test_recall_through_the_hand_over_equals_transformers(
    tmp_path: Path, demo_model: Path, arguments: tuple[str, ...]
) -> None:
    """One question about a value in each block of the prompt; most answers are right, all equal the reference's."""
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    prompts = one_prompt_a_block(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    reference = answers(model, tokenizer, [prompt.token_ids for prompt in prompts], NEW_TOKENS)
    served = asyncio.run(recall_by_service(tmp_path, prompts, *arguments))
    assert served == [text.removesuffix("…") for text in reference]
    right = sum(text == prompt.answer for text, prompt in zip(served, prompts, strict=True))
    assert right >= 0.9 * len(prompts)
