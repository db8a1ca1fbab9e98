"""Questions whose right answer does not hang on rounding.

Equal logits give equal tokens, but float32 logits differ by some 1e-6 between batch shapes, and a seeded draw that lies
closer than that to a boundary falls on either side. So an answer is computed again, all positions at once, by the model
itself and by models whose weights are off by ten times as much: one that they do not agree on is no measure, and its
question is drawn anew. The model itself is among them, since by chance all the others may be off to the same side.
"""

import asyncio
import random
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from contract.sampling import SamplingParams
from engine.sampling.logits_processors import SamplingRow
from engine.sampling.sampler import sample
from tests.chaos.asking import Answer, Client, draw_questions, undisturbed

_NOISE = 2e-5
_NUM_SHAKEN = 5
_MAX_ROUNDS = 8


async def steady_answers(
    client: Client, rng: random.Random, count: int, **ranges: tuple[int, int]
) -> list[Answer]:
    """The undisturbed answers of the first ``count`` steady questions; ``ranges`` are those of ``draw_questions``.

    Raises AssertionError where the service gives an answer that every one of the models contradicts.
    """
    models = await asyncio.to_thread(_models)
    steady: list[Answer] = []
    for _ in range(_MAX_ROUNDS):
        answers = await undisturbed(client, draw_questions(rng, count, **ranges))
        steady += await asyncio.to_thread(_steady_ones, answers, models)
        if len(steady) >= count:
            return steady[:count]
    raise AssertionError(f"only {len(steady)} of {count} questions do not hang on rounding")


def _models() -> list[Any]:
    folder = Path(str(resources.files("kvbaton"))) / "demo_model"
    noise = torch.Generator().manual_seed(1)
    models = []
    for strength in (0.0, *(_NOISE for _ in range(_NUM_SHAKEN))):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            for weights in model.parameters():
                weights.mul_(1 + strength * torch.randn(weights.shape, generator=noise))
        models.append(model)
    return models


def _steady_ones(answers: Sequence[Answer], models: Sequence[Any]) -> list[Answer]:
    return [answer for answer in answers if _is_steady(answer, models)]


def _is_steady(answer: Answer, models: Sequence[Any]) -> bool:
    opinions = [_tokens_by(model, answer) for model in models]
    places = list(zip(*opinions, strict=True))
    for place, (token, said) in enumerate(zip(answer.token_ids, places, strict=True)):
        assert token in said or len(set(said)) > 1, (
            f"question {answer.question.number}: token {place} is {token}, every model says {said[0]}"
        )
    return all(set(said) == {token} for token, said in zip(answer.token_ids, places, strict=True))


@torch.no_grad()
def _tokens_by(model: Any, answer: Answer) -> list[int | None]:
    question = answer.question
    sampling = SamplingParams(
        temperature=question.temperature, seed=question.seed, max_tokens=question.max_tokens, ignore_eos=True
    )
    ids = torch.tensor([[*question.prompt, *answer.token_ids]])
    first = len(question.prompt)
    rows = [SamplingRow(sampling, (), first + i, i) for i in range(len(answer.token_ids))]
    return sample(model(ids).logits[0, first - 1 : -1], rows).token_ids
