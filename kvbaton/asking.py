"""Many prompts through one pipeline: all are checked before the first is sent."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from contract.errors import InvalidRequestError, KvbatonError
from kvbaton.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    completions,
    prompt_logprobs,
)
from kvbaton.prompts import named
from router.pipeline import Pipeline
from router.request import EmbeddingRequest, GenerationRequest
from text.chat import Chat
from text.model_card import ModelCard
from text.tokenizer import Tokenizer

_MAX_AT_ONCE = 1024
A = TypeVar("A")
T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """A request that can be sent, its prompt as token ids. text: the prompt's own, None where it came as token ids."""

    request: GenerationRequest
    prompt_token_ids: tuple[int, ...]
    text: str | None


def check_all(
    pipeline: Pipeline, card: ModelCard, asked: Iterable[Callable[[], GenerationRequest]]
) -> list[Question]:
    """Make every request and check it as the pipeline does. Raises InvalidRequestError that names the first bad prompt."""
    questions = []
    for index, make in enumerate(asked):
        try:
            request = make()
            token_ids = tuple(pipeline.preparer.check(request).prompt_token_ids)
        except InvalidRequestError as error:
            raise named(error, f"prompt {index}: ") from error
        text = _text(request, token_ids, card.tokenizer)
        questions.append(Question(replace(request, prompt=token_ids), token_ids, text))
    return questions


def _text(request: GenerationRequest, token_ids: tuple[int, ...], tokenizer: Tokenizer) -> str | None:
    """What the model reads: of a chat that is its template, filled."""
    if isinstance(request.prompt, Chat):
        return tokenizer.decode(token_ids, skip_special_tokens=False)
    return request.prompt if isinstance(request.prompt, str) else None


def check_embeddings(
    pipeline: Pipeline, asked: Iterable[Callable[[], EmbeddingRequest]]
) -> list[EmbeddingRequest]:
    """The same for embeddings, with their prompts as token ids."""
    requests = []
    for index, make in enumerate(asked):
        try:
            request = make()
            token_ids = tuple(pipeline.preparer.check(request).prompt_token_ids)
        except InvalidRequestError as error:
            raise named(error, f"prompt {index}: ") from error
        requests.append(replace(request, prompt=token_ids))
    return requests


async def ask_all(
    pipeline: Pipeline, tokenizer: Tokenizer, questions: Sequence[Question], on_answer: Callable[[], None]
) -> list[RequestOutput]:
    """The answers in the order of the questions; ``on_answer`` is called after each.

    Raises the first error, which names the prompt, and ends the others.
    """
    return await _all_of(questions, partial(_ask, pipeline, tokenizer), on_answer)


async def embed_all(
    pipeline: Pipeline, requests: Sequence[EmbeddingRequest], on_answer: Callable[[], None]
) -> list[EmbeddingRequestOutput]:
    """The same for embeddings."""
    return await _all_of(requests, partial(_embed, pipeline), on_answer)


async def _all_of(
    asked: Sequence[A], answer: Callable[[A], Awaitable[T]], on_answer: Callable[[], None]
) -> list[T]:
    gate = asyncio.Semaphore(_MAX_AT_ONCE)

    async def one(index: int, each: A) -> T:
        async with gate:
            try:
                output = await answer(each)
            except KvbatonError as error:
                raise named(error, f"prompt {index}: ") from error
        on_answer()
        return output

    tasks = [asyncio.create_task(one(*each)) for each in enumerate(asked)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _embed(pipeline: Pipeline, asked: EmbeddingRequest) -> EmbeddingRequestOutput:
    (found,) = await pipeline.embed(replace(asked, arrival=time.monotonic()))
    return EmbeddingRequestOutput(
        request_id=asked.request_id,
        prompt_token_ids=list(asked.prompt) if isinstance(asked.prompt, tuple) else [],
        outputs=EmbeddingOutput(list(found.embedding)),
        num_cached_tokens=found.usage.num_cached_tokens if found.usage else 0,
    )


async def _ask(pipeline: Pipeline, tokenizer: Tokenizer, question: Question) -> RequestOutput:
    request = replace(question.request, arrival=time.monotonic())
    async with aclosing(pipeline.generate(request)) as answer:
        deltas = [delta async for delta in answer]
    usages = [delta.usage for delta in deltas if delta.usage]
    timings = [delta.timings for delta in deltas if delta.timings]
    return RequestOutput(
        request_id=request.request_id,
        prompt=question.text,
        prompt_token_ids=list(question.prompt_token_ids),
        outputs=completions(deltas, tokenizer),
        metrics=max(timings, key=lambda one: one.end_to_end),
        prompt_logprobs=prompt_logprobs(deltas, tokenizer),
        num_cached_tokens=sum(usage.num_cached_tokens for usage in usages),
    )
