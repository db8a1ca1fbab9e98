"""The prompts of ``LLM``, in vLLM's formats, and their way through one pipeline.

All prompts are checked before the first is sent.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypedDict, TypeVar

from msgspec import structs

from contract.errors import InvalidRequestError, KvbatonError
from kvbaton.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    completions,
    prompt_logprobs,
)
from router.intake.request import EmbeddingRequest, GenerationRequest
from router.pipeline import Pipeline
from text.chat import Chat, parse_messages
from text.model_card import ModelCard
from text.tokenizer import Tokenizer
from text.tools import Tool, parse_tools

_MAX_AT_ONCE = 1024
A = TypeVar("A")
T = TypeVar("T")
R = TypeVar("R", GenerationRequest, EmbeddingRequest)


class TextPrompt(TypedDict, total=False):
    """A text prompt. cache_salt: prompts with different salts never share cached KV."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt of token ids. cache_salt: as in ``TextPrompt``."""

    prompt_token_ids: Sequence[int]
    cache_salt: str


PromptType = str | TextPrompt | TokensPrompt | list[int]
"""One prompt: text, token ids, or an object with either."""


@dataclass(frozen=True)
class Prompt:
    """One checked prompt. others: further fields of the request."""

    content: str | tuple[int, ...] | Chat
    others: Mapping[str, Any] = field(default_factory=dict)


def parse_prompts(prompts: Any) -> list[Prompt]:
    """Check one prompt or a sequence of prompts. Raises InvalidRequestError that names the prompt at fault."""
    is_list = isinstance(prompts, list | tuple)
    # A list of nothing but integers is one prompt of token ids.
    is_tokens = is_list and bool(prompts) and all(type(token) is int for token in prompts)
    if is_tokens or isinstance(prompts, str | dict):
        return [parse_prompt(prompts, "prompts")]
    if not is_list:
        raise InvalidRequestError(
            f"prompts is of type {type(prompts).__name__}; it must be a prompt or a list of prompts",
            param="prompts",
        )
    return [parse_prompt(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]


def parse_conversations(messages: Any, tools: Any = None) -> list[Prompt]:
    """Check one conversation or a list. Raises InvalidRequestError that names the message, or the tool, at fault."""
    parsed_tools = parse_tools(tools)
    if isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple):
        chats = [_chat(one, parsed_tools, f"prompt {index}: ") for index, one in enumerate(messages)]
    else:
        chats = [_chat(messages, parsed_tools, "")]
    return [Prompt(chat) for chat in chats]


def named(error: KvbatonError, where: str) -> KvbatonError:
    """Return the error with its place at the beginning of its message."""
    return type(error)(f"{where}{error.message}", param=error.param)


def _chat(raw: Any, tools: tuple[Tool, ...], where: str) -> Chat:
    try:
        return Chat(messages=parse_messages(list(raw) if isinstance(raw, tuple) else raw), tools=tools)
    except InvalidRequestError as error:
        raise named(error, where) from error


def parse_prompt(raw: Any, where: str) -> Prompt:
    """Check one prompt. Raises InvalidRequestError that begins with ``where``."""
    if not isinstance(raw, dict):
        return Prompt(_content(raw, where))
    unknown = raw.keys() - {"prompt", "prompt_token_ids", "cache_salt"}
    given = raw.keys() & {"prompt", "prompt_token_ids"}
    if unknown or len(given) != 1:
        raise InvalidRequestError(
            f"{where} has {', '.join(map(repr, raw)) or 'nothing'}; it must have 'prompt' or 'prompt_token_ids', and may"
            " have 'cache_salt'",
            param=where,
        )
    name = given.pop()
    content = _content(raw[name], f"{where}[{name!r}]")
    if isinstance(content, str) != (name == "prompt"):
        raise InvalidRequestError(
            f"{where}[{name!r}] is {raw[name]!r:.60}; it must be {'a text' if name == 'prompt' else 'token ids'}",
            param=where,
        )
    return Prompt(content, {"cache_salt": raw.get("cache_salt")})


def _content(raw: Any, where: str) -> str | tuple[int, ...]:
    if isinstance(raw, str):
        return raw
    if isinstance(raw, list | tuple) and all(type(token) is int for token in raw):
        return tuple(raw)
    raise InvalidRequestError(
        f"{where} is {raw!r:.60}; it must be a text or a list of token ids", param=where
    )


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
    # As many as keep any worker busy: each request that waits in the router holds its tokens and a task.
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
