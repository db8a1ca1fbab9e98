"""Questions whose right answer does not depend on rounding.

Equal logits give equal tokens, but float32 logits differ by some 1e-6 between batch shapes, and a seeded draw that is
closer than that to a boundary may fall on either side. So each answer is computed again, all positions at once, by the
model itself and by models whose weights deviate ten times as much. If they disagree, the question is replaced by a new
one. The model itself is among them, since all the others may deviate to the same side by chance.
"""

import asyncio
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from contract.sampling import SamplingParams
from engine.sampling.logits_processors import SamplingRow
from engine.sampling.sampler import sample
from tests.chaos.clients import Answer, Client, draw_questions, reference_answers
from tests.chaos.models import DEMO

Model = Any
"""A model of transformers."""
_NOISE = 2e-5
_NUM_SHAKEN = 5
_MAX_ROUNDS = 8


async def steady_answers(
    client: Client, rng: random.Random, count: int, folder: Path | None = None, **drawn: Any
) -> list[Answer]:
    """Return the reference answers to the first ``count`` steady questions; ``drawn``: arguments of ``draw_questions``.

    folder: of the model; None: the demo model. Raises AssertionError if the service gives an answer that every one of the
    models contradicts.
    """
    models = await asyncio.to_thread(noisy_models, folder)
    steady: list[Answer] = []
    for _ in range(_MAX_ROUNDS):
        answers = await reference_answers(client, draw_questions(rng, count, **drawn))
        steady += await asyncio.to_thread(_steady_ones, answers, models)
        if len(steady) >= count:
            return steady[:count]
    raise AssertionError(f"only {len(steady)} of {count} questions do not depend on rounding")


@cache
def noisy_models(folder: Path | None = None) -> tuple[Model, ...]:
    """Return the model of this folder, the demo model if it is None, and models whose weights deviate a little."""
    folder = folder or DEMO.folder(Path())
    noise = torch.Generator().manual_seed(1)
    models = []
    for strength in (0.0, *(_NOISE for _ in range(_NUM_SHAKEN))):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            for weights in model.parameters():
                weights.mul_(1 + strength * torch.randn(weights.shape, generator=noise))
        models.append(model)
    return tuple(models)


def _steady_ones(answers: Sequence[Answer], models: Sequence[Model]) -> list[Answer]:
    return [answer for answer in answers if is_steady(answer, models)]


def is_steady(answer: Answer, models: Sequence[Model]) -> bool:
    """Return whether all models give the tokens of an answer. Raises AssertionError if all agree on another token."""
    question = answer.question
    sampling = SamplingParams(
        temperature=question.temperature, seed=question.seed, max_tokens=question.max_tokens, ignore_eos=True
    )
    first = len(question.prompt)
    rows = [SamplingRow(sampling, (), first + i, i) for i in range(len(answer.token_ids))]
    return agree(models, rows, question.prompt, answer.token_ids, name=f"question {question.number}")


def agree(
    models: Sequence[Model],
    rows: Sequence[SamplingRow],
    prompt: Sequence[int],
    token_ids: Sequence[int],
    *,
    name: str,
) -> bool:
    """Return whether all models give these tokens, sampled by ``rows``, behind the prompt.

    Raises AssertionError, with the name of the question, if all agree on another token.
    """
    opinions = [_tokens_by(model, rows, prompt, token_ids) for model in models]
    places = list(zip(*opinions, strict=True))
    for place, (token, predicted) in enumerate(zip(token_ids, places, strict=True)):
        assert token in predicted or len(set(predicted)) > 1, (
            f"{name}: token {place} is {token}, but every model gives {predicted[0]}"
        )
    return all(set(predicted) == {token} for token, predicted in zip(token_ids, places, strict=True))


@torch.no_grad()
def _tokens_by(
    model: Model, rows: Sequence[SamplingRow], prompt: Sequence[int], token_ids: Sequence[int]
) -> list[int | None]:
    ids = torch.tensor([[*prompt, *token_ids]])
    return sample(model(ids).logits[0, len(prompt) - 1 : -1], rows).token_ids
