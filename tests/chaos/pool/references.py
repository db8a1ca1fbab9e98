"""The right answers to mixed questions, from an undisturbed pool."""

import asyncio
import random
from collections.abc import Sequence

import aiohttp

from tests.chaos.pool.answers import ACCEPTED, MixedAnswer, Way, ask, mistake_in
from tests.chaos.pool.balancer import Balancer
from tests.chaos.pool.grpc_answers import ask_grpc, can_be_sent
from tests.chaos.pool.questions import Kind, MixedQuestion, draw_mixed
from tests.chaos.pool.rounding import depends_on_rounding
from tests.chaos.steady import noisy_models

_AT_ONCE = 16
_MAX_ROUNDS = 12


async def reference_answers(
    balancer: Balancer, rng: random.Random, count: int, longest_answer: int
) -> list[MixedAnswer]:
    """Return the answers to at least ``count`` questions, equally many of each kind, that do not depend on rounding.

    Raises AssertionError if the service gives another answer than the models, or than over another API.
    """
    models = await asyncio.to_thread(noisy_models)
    num_each = -(-count // len(Kind))
    steady: dict[Kind, list[MixedAnswer]] = {kind: [] for kind in Kind}
    for _ in range(_MAX_ROUNDS):
        lacking = [kind for kind in Kind if len(steady[kind]) < num_each]
        if not lacking:
            return [answer for answers in steady.values() for answer in answers[:num_each]]
        questions = draw_mixed(rng, num_each * len(lacking), longest_answer, lacking)
        first = await _ask_all(balancer, questions, [Way.WHOLE])
        second = await _ask_all(balancer, questions, [Way.STREAM, Way.GRPC])
        for answer, again in zip(first, second, strict=True):
            prompt = await _prompt_ids(balancer, answer.question)
            if await asyncio.to_thread(depends_on_rounding, answer, prompt, models):
                continue
            assert mistake_in(again, answer) is None, mistake_in(again, answer)
            steady[answer.question.kind].append(answer)
    raise AssertionError(
        f"too many answers depend on rounding: {[(k.value, len(a)) for k, a in steady.items()]}"
    )


async def _ask_all(
    balancer: Balancer, questions: Sequence[MixedQuestion], ways: Sequence[Way]
) -> list[MixedAnswer]:
    """Ask all questions, in these ways in turn."""
    gate = asyncio.Semaphore(_AT_ONCE)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        balancer.door("http") as web,
        balancer.door("grpc") as grpc,
        aiohttp.ClientSession(connector=connector) as session,
    ):

        async def one(number: int, question: MixedQuestion) -> MixedAnswer:
            way = ways[number % len(ways)]
            async with gate:
                if way is Way.GRPC and can_be_sent(question):
                    answer = await ask_grpc(grpc.address, question)
                else:
                    url = f"http://{web.address}"
                    answer = await ask(session, url, question, is_streamed=way is not Way.WHOLE)
            assert answer.is_whole and answer.status == ACCEPTED, (question, answer.status, answer.error)
            return answer

        return await asyncio.gather(*(one(number, question) for number, question in enumerate(questions)))


async def _prompt_ids(balancer: Balancer, question: MixedQuestion) -> list[int]:
    """Return the prompt as tokens; the service applies its chat template to the messages and tools of a conversation."""
    if "prompt" in question.body:
        return list(question.body["prompt"])
    asked = {name: question.body[name] for name in ("model", "messages", "tools", "tool_choice")}
    async with (
        balancer.door("http") as web,
        aiohttp.ClientSession() as session,
        session.post(f"http://{web.address}/tokenize", json=asked) as response,
    ):
        tokens: list[int] = (await response.json())["tokens"]
    return tokens
