"""Runs many prompts through one pipeline; all are checked before the first is sent."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from msgspec import structs

from contract.errors import InvalidRequestError, KvbatonError
from kvbaton.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    completions,
    prompt_logprobs,
)
from kvbaton.prompts import named
from router.intake.request import EmbeddingRequest, GenerationRequest
from router.pipeline import Pipeline
from text.chat import Chat
from text.model_card import ModelCard
from text.tokenizer import Tokenizer

_MAX_AT_ONCE = 1024
A = TypeVar("A")
T = TypeVar("T")
R = TypeVar("R", GenerationRequest, EmbeddingRequest)


@dataclass(frozen=True)
class CheckedRequest:
    """A checked request, with its prompt as token ids. text: the prompt's text; None if it was given as token ids."""

    request: GenerationRequest
    prompt_token_ids: tuple[int, ...]
    text: str | None


def check_all(
    pipeline: Pipeline, card: ModelCard, makers: Iterable[Callable[[], GenerationRequest]]
) -> list[CheckedRequest]:
    """Make and check every request. Raises InvalidRequestError that names the first invalid prompt."""
    return [
        CheckedRequest(
            structs.replace(request, prompt=token_ids), token_ids, _text(request, token_ids, card.tokenizer)
        )
        for request, token_ids in _checked(pipeline, makers)
    ]


def check_embeddings(
    pipeline: Pipeline, makers: Iterable[Callable[[], EmbeddingRequest]]
) -> list[EmbeddingRequest]:
    """Make and check every request, like ``check_all``; return them with token ids as their prompts."""
    return [structs.replace(request, prompt=token_ids) for request, token_ids in _checked(pipeline, makers)]


def _checked(pipeline: Pipeline, makers: Iterable[Callable[[], R]]) -> Iterator[tuple[R, tuple[int, ...]]]:
    """Yield each request, made and checked, and its prompt's token ids."""
    for index, make in enumerate(makers):
        try:
            request = make()
            token_ids = tuple(pipeline.preparer.check(request).prompt_token_ids)
        except InvalidRequestError as error:
            raise named(error, f"prompt {index}: ") from error
        yield request, token_ids


def _text(request: GenerationRequest, token_ids: tuple[int, ...], tokenizer: Tokenizer) -> str | None:
    """Return the text that the model reads, for a chat the rendered template; None for token ids."""
    if isinstance(request.prompt, Chat):
        return tokenizer.decode(token_ids, skip_special_tokens=False)
    return request.prompt if isinstance(request.prompt, str) else None


async def run_all(
    pipeline: Pipeline,
    tokenizer: Tokenizer,
    requests: Sequence[CheckedRequest],
    on_answer: Callable[[], None],
) -> list[RequestOutput]:
    """Return the answers in the order of the requests; call ``on_answer`` after each.

    Raises the first error, which names the prompt, and cancels the others.
    """
    return await _all_of(requests, partial(_run, pipeline, tokenizer), on_answer)


async def embed_all(
    pipeline: Pipeline, requests: Sequence[EmbeddingRequest], on_answer: Callable[[], None]
) -> list[EmbeddingRequestOutput]:
    """Return the embeddings in the order of the requests; call ``on_answer`` after each."""
    return await _all_of(requests, partial(_embed, pipeline), on_answer)


async def _all_of(
    items: Sequence[A], answer: Callable[[A], Awaitable[T]], on_answer: Callable[[], None]
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

    tasks = [asyncio.create_task(one(*each)) for each in enumerate(items)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _embed(pipeline: Pipeline, request: EmbeddingRequest) -> EmbeddingRequestOutput:
    (found,) = await pipeline.embed(structs.replace(request, arrival=time.monotonic()))
    return EmbeddingRequestOutput(
        request_id=request.request_id,
        prompt_token_ids=list(request.prompt) if isinstance(request.prompt, tuple) else [],
        outputs=EmbeddingOutput(list(found.embedding)),
        num_cached_tokens=found.usage.num_cached_tokens if found.usage else 0,
    )


async def _run(pipeline: Pipeline, tokenizer: Tokenizer, checked: CheckedRequest) -> RequestOutput:
    request = structs.replace(checked.request, arrival=time.monotonic())
    async with pipeline.generate(request) as answer:
        deltas = [delta async for delta in answer]
    usages = [delta.usage for delta in deltas if delta.usage]
    timings = [delta.timings for delta in deltas if delta.timings]
    return RequestOutput(
        request_id=request.request_id,
        prompt=checked.text,
        prompt_token_ids=list(checked.prompt_token_ids),
        outputs=completions(deltas, tokenizer),
        metrics=max(timings, key=lambda one: one.end_to_end),
        prompt_logprobs=prompt_logprobs(deltas, tokenizer),
        num_cached_tokens=sum(usage.num_cached_tokens for usage in usages),
    )
