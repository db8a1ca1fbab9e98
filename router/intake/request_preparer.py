"""Checks a client's requests, and turns them into token ids with every default filled in."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from weakref import WeakValueDictionary

from contract.errors import ContextLengthError, InvalidRequestError, UnsupportedFieldError
from router.intake.limits import MAX_PROMPT_TOKENS, TenantRules, check_limits
from router.intake.model_source import ModelSource
from router.intake.prepared_request import NO_STOPS, PreparedRequest, prepare, prepare_embedding
from router.intake.request import EmbeddingRequest, GenerationRequest, tokenize
from router.intake.tokenizing import TokenizerThreads
from router.workers.registry import Registry
from text.model_card import ModelCard
from text.stop import StopAutomaton

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
        max_model_len = self._max_model_len(card)
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
        return self._checked(request, tokenize(request, card, self._max_model_len(card)), card)

    async def num_prompt_tokens(self, request: GenerationRequest) -> int:
        """Return how many tokens the prompt has, also if that is more than the model takes.

        Raises KvbatonError, ContextLengthError for a text that is too long to be tokenized among them.
        """
        check_limits(request)
        card = self._models.card_named(request.model)
        return len(await self._tokenizers.tokenize(request, card, self._max_model_len(card)))

    def _checked(self, request: _Request, prompt_ids: list[int], card: ModelCard) -> PreparedRequest:
        make: Callable[..., PreparedRequest]
        exact: Callable[..., PreparedRequest]
        if isinstance(request, GenerationRequest):
            given = request.stop
            stop = self._stops.setdefault(given, StopAutomaton(given)) if given else NO_STOPS
            shortens = self._shortens_answers
            make = partial(prepare, request, prompt_ids, card, stop=stop, shortens_answers=shortens)
            exact = partial(make, shortens_answers=False)
        else:
            make = exact = partial(prepare_embedding, request, prompt_ids, card)
        return self._rules.apply(self._within_length(make, exact, card))

    def _within_length(
        self, make: Callable[..., PreparedRequest], exact: Callable[..., PreparedRequest], card: ModelCard
    ) -> PreparedRequest:
        """Prepare a request for the attached workers; if it is too long, for a larger one that was detached a moment ago.

        An answer is not shortened for a small worker while a larger one starts again. exact: prepares without shortening.
        """
        now = self._registry.max_model_len(card.max_model_len)
        recent = self._max_model_len(card)
        if now < recent:
            with suppress(ContextLengthError):
                return exact(max_model_len=now, timeout_seconds=self._timeout_seconds)
        return make(max_model_len=recent, timeout_seconds=self._timeout_seconds)

    def _max_model_len(self, card: ModelCard) -> int:
        return self._registry.recent_max_model_len(card.max_model_len)
