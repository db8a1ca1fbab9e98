"""The right answers to mixed questions, from an undisturbed pool."""

import asyncio
import random
from collections.abc import Sequence
from itertools import zip_longest

import aiohttp

from contract.sampling import choice_seed
from tests.chaos.clients import Answer, Api, Question
from tests.chaos.pool.answers import ACCEPTED, MixedAnswer, ask, mistake_in
from tests.chaos.pool.questions import Kind, MixedQuestion, draw_mixed
from tests.chaos.steady import Model, is_steady, noisy_models

_AT_ONCE = 16
_MAX_ROUNDS = 8
_FORCED = (Kind.GRAMMAR, Kind.TOOLS)


async def reference_answers(
    address: str, rng: random.Random, count: int, longest_answer: int
) -> list[MixedAnswer]:
    """Return the answers to ``count`` questions, of every kind about as many, whose answers do not depend on rounding.

    Raises AssertionError if the service gives another answer than the models, or than the time before.
    """
    models = await asyncio.to_thread(noisy_models)
    steady: dict[Kind, list[MixedAnswer]] = {kind: [] for kind in Kind}
    for _ in range(_MAX_ROUNDS):
        questions = draw_mixed(rng, count, longest_answer)
        first = await _ask_all(address, questions, is_streamed=False)
        second = await _ask_all(address, questions, is_streamed=True)
        for answer, again in zip(first, second, strict=True):
            if answer.question.kind not in _FORCED and not await asyncio.to_thread(
                _is_steady, answer, models
            ):
                continue
            assert mistake_in(again, answer) is None, mistake_in(again, answer)
            steady[answer.question.kind].append(answer)
        in_turn = [answer for answers in zip_longest(*steady.values()) for answer in answers if answer]
        if len(in_turn) >= count:
            return in_turn[:count]
    raise AssertionError(f"only {len(in_turn)} of {count} questions do not depend on rounding")


async def _ask_all(
    address: str, questions: Sequence[MixedQuestion], *, is_streamed: bool
) -> list[MixedAnswer]:
    gate = asyncio.Semaphore(_AT_ONCE)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(question: MixedQuestion) -> MixedAnswer:
            async with gate:
                answer = await ask(session, f"http://{address}", question, is_streamed=is_streamed)
            assert answer.is_whole and answer.status == ACCEPTED, (question, answer.status, answer.error)
            return answer

        return await asyncio.gather(*(one(question) for question in questions))


def _is_steady(answer: MixedAnswer, models: Sequence[Model]) -> bool:
    """Return whether slightly different models give every choice the same tokens."""
    body = answer.question.body
    return all(
        is_steady(
            Answer(
                Question(
                    answer.question.number,
                    tuple(body["prompt"]),
                    body["max_tokens"],
                    body["temperature"],
                    choice_seed(body.get("seed", 0), number),
                ),
                Api.HTTP_WHOLE,
                token_ids=choice.token_ids,
            ),
            models,
        )
        for number, choice in enumerate(answer.choices)
    )
