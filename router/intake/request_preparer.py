"""Checks a client's requests, and turns them into token ids with every default filled in.

Long texts are tokenized on threads, so that the event loop stays free for other requests.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from contract.errors import ContextLengthError, InvalidRequestError, OverloadedError, UnsupportedFieldError
from router.intake.limits import MAX_PROMPT_TOKENS, TenantRules, check_limits
from router.intake.model_source import ModelSource
from router.intake.prepared_request import NO_STOPS, PreparedRequest, prepare, prepare_embedding
from router.intake.request import EmbeddingRequest, GenerationRequest, tokenize
from router.workers.registry import Registry
from text.chat import Chat
from text.length_bound import check_text_size
from text.model_card import ModelCard
from text.stop import StopAutomaton
from text.tokenizer import Tokenizer

_SHORT = 4_000
"""Shorter texts (characters) are tokenized on the event loop, since a thread would take longer."""
_LONG = 2**16
"""Longer texts (characters) are tokenized on their own thread, so that shorter ones do not wait for them."""
MAX_WAITING_CHARACTERS = 64 * 2**20
_T = TypeVar("_T")


class TokenizerThreads:
    """Owns two threads, for long texts and for others; each tokenizes one text at a time, which bounds the memory.

    max_waiting_characters: of all texts that wait or are being tokenized.
    """

    def __init__(self, max_waiting_characters: int = MAX_WAITING_CHARACTERS) -> None:
        self._max_waiting = max_waiting_characters
        self.num_waiting = 0
        """Characters that are being tokenized or wait for it."""
        self._long = ThreadPoolExecutor(1, thread_name_prefix="tokenize long texts")
        self._short = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def tokenize(
        self, request: GenerationRequest | EmbeddingRequest, card: ModelCard, max_model_len: int
    ) -> list[int]:
        """Return the prompt as token ids. Raises InvalidRequestError, OverloadedError."""
        if isinstance(request.prompt, tuple):
            return tokenize(request, card, max_model_len)
        return await self.run(size_of(request.prompt), partial(tokenize, request, card, max_model_len))

    async def run(self, size: int, work: Callable[[], _T]) -> _T:
        """Return the result of ``work`` on a text of ``size`` characters. Raises OverloadedError if too many wait."""
        if size < _SHORT:
            return work()
        # a text that waits for no other one is accepted at any size: the limit of a body bounds it
        if self.num_waiting and self.num_waiting + size > self._max_waiting:
            raise OverloadedError(
                f"texts of {self.num_waiting} characters wait to be tokenized, and the limit is {self._max_waiting}; "
                "send this one again later"
            )
        self.num_waiting += size
        try:
            # a long text takes long, and short ones would wait behind it
            thread = self._short if size < _LONG else self._long
            return await asyncio.get_running_loop().run_in_executor(thread, work)
        finally:
            self.num_waiting -= size

    def close(self) -> None:
        """Drop the texts that wait. Running work is not stopped."""
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)


def size_of(prompt: str | Chat) -> int:
    """Return the approximate number of characters of a prompt, without rendering it.

    A chat always counts as too long for the event loop, since another process renders it.
    """
    if isinstance(prompt, str):
        return len(prompt)
    size = _SHORT
    open_values: list[Any] = [prompt.messages, prompt.documents, prompt.template_kwargs, prompt.tools]
    # without recursion: values of a client may be nested deeply
    while open_values:
        value = open_values.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, dict):
            open_values += value.values()
        elif isinstance(value, list | tuple):
            open_values += value
        else:
            size += 1
    return size


def encode_text(tokenizer: Tokenizer, text: str, max_tokens: int, has_special_tokens: bool) -> list[int]:
    """Return the token ids of a text that may be longer than the model takes. Raises ContextLengthError far beyond that."""
    check_text_size(text, max_tokens, "prompt")
    return tokenizer.encode(text, add_special_tokens=has_special_tokens)


_Request = GenerationRequest | EmbeddingRequest


class RequestPreparer:
    """Applies chat template and tokenizer, the model's defaults, all limits, and the rules for clients.

    timeout_seconds: the longest deadline of a request. shortens_answers: see ``prepare``.
    """

    def __init__(
        self,
        models: ModelSource,
        registry: Registry,
        tokenizers: TokenizerThreads,
        rules: TenantRules,
        timeout_seconds: float,
        *,
        shortens_answers: bool = True,
    ) -> None:
        self._models = models
        self._registry = registry
        self._tokenizers = tokenizers
        self._rules = rules
        self._timeout_seconds = timeout_seconds
        self._shortens_answers = shortens_answers
        # its states grow while it searches, so requests with the same strings share one
        self._stops: WeakValueDictionary[tuple[str, ...], StopAutomaton] = WeakValueDictionary()

    def card_for(self, request: _Request) -> ModelCard:
        """Return the model that a request names. Raises UnsupportedFieldError if it cannot answer the request."""
        card = self._models.card_named(request.model)
        if self._registry.embeds_only and isinstance(request, GenerationRequest):
            raise UnsupportedFieldError(
                f"the model {card.name} has no output head: it gives embeddings only (/v1/embeddings, Embed)",
                param="model",
            )
        return card

    async def prepare(self, requests: Sequence[_Request], card: ModelCard) -> list[PreparedRequest]:
        """Prepare the prompts of one client's request, one after the other.

        Raises KvbatonError, InvalidRequestError for more tokens than they may have together among them.
        """
        prepared: list[PreparedRequest] = []
        max_model_len = self._registry.recent_max_model_len(card.max_model_len)
        room = max(MAX_PROMPT_TOKENS, max_model_len)
        for request in requests:
            if prepared:
                await asyncio.sleep(0)  # to prepare a prompt takes up to a millisecond
            check_limits(request)
            prompt_ids = await self._tokenizers.tokenize(request, card, max_model_len)
            prepared.append(self._checked(request, prompt_ids, card))
            room -= len(prepared[-1].prompt_token_ids)
            if room < 0:
                raise InvalidRequestError(
                    f"the prompts of one request have more than {MAX_PROMPT_TOKENS} tokens together; send fewer"
                )
        return prepared

    def check(self, request: _Request) -> PreparedRequest:
        """Prepare one prompt, from any thread. Raises KvbatonError."""
        check_limits(request)
        card = self.card_for(request)
        return self._checked(
            request, tokenize(request, card, self._registry.recent_max_model_len(card.max_model_len)), card
        )

    async def num_prompt_tokens(self, request: GenerationRequest) -> int:
        """Return how many tokens the prompt has, also if that is more than the model takes.

        Raises KvbatonError, ContextLengthError for a text that is too long to be tokenized among them.
        """
        check_limits(request)
        card = self._models.card_named(request.model)
        return len(
            await self._tokenizers.tokenize(
                request, card, self._registry.recent_max_model_len(card.max_model_len)
            )
        )

    def _checked(self, request: _Request, prompt_ids: list[int], card: ModelCard) -> PreparedRequest:
        """Return a request for the attached workers; if it is too long, for a larger one that was detached a moment ago.

        An answer is not shortened for a small worker while a larger one starts again.
        """
        now = self._registry.max_model_len(card.max_model_len)
        recent = self._registry.recent_max_model_len(card.max_model_len)
        if now < recent:
            # a worker that was detached a moment ago may take it when it is back, so this is no error yet
            with suppress(ContextLengthError):
                return self._prepared(request, prompt_ids, card, now, shortens_answers=False)
        return self._prepared(request, prompt_ids, card, recent, shortens_answers=self._shortens_answers)

    def _prepared(
        self,
        request: _Request,
        prompt_ids: list[int],
        card: ModelCard,
        max_model_len: int,
        *,
        shortens_answers: bool,
    ) -> PreparedRequest:
        if isinstance(request, EmbeddingRequest):
            made = prepare_embedding(request, prompt_ids, card, max_model_len, self._timeout_seconds)
        else:
            given = request.stop
            stop = self._stops.setdefault(given, StopAutomaton(given)) if given else NO_STOPS
            made = prepare(
                request,
                prompt_ids,
                card,
                max_model_len,
                self._timeout_seconds,
                stop,
                shortens_answers=shortens_answers,
            )
        return self._rules.apply(made)
