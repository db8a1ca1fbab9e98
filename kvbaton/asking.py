"""Many prompts through one pipeline: all are checked before the first is sent."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from contract.errors import InvalidRequestError, KvbatonError
from kvbaton.outputs import RequestOutput, completions, prompt_logprobs
from kvbaton.prompts import named
from router.pipeline import Pipeline
from router.request import GenerationRequest
from text.chat import Chat
from text.model_card import ModelCard
from text.tokenizer import Tokenizer

_MAX_AT_ONCE = 1024


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
            token_ids = tuple(pipeline.check(request).prompt_token_ids)
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


async def ask_all(
    pipeline: Pipeline, tokenizer: Tokenizer, questions: Sequence[Question], on_answer: Callable[[], None]
) -> list[RequestOutput]:
    """The answers in the order of the questions; ``on_answer`` is called after each.

    Raises the first error, which names the prompt, and ends the others.
    """
    gate = asyncio.Semaphore(_MAX_AT_ONCE)

    async def ask(index: int, question: Question) -> RequestOutput:
        async with gate:
            try:
                output = await _ask(pipeline, tokenizer, question)
            except KvbatonError as error:
                raise named(error, f"prompt {index}: ") from error
        on_answer()
        return output

    tasks = [asyncio.create_task(ask(*each)) for each in enumerate(questions)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
