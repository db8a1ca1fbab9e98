"""The life of a request, on one page.

1. **Admit.** The ledger takes the request in, or the client is told to come back later.
2. **Tokenize.** Chat template and tokenizer make token ids; defaults are filled in, the seed is drawn, ranges and the
   model's length are checked. From here on nothing but the answer is text.
3. **Bind.** The request waits in the router's line until a prefill and a decode worker (or one that is both) have room.
4. **Send.** ``Prefill`` and ``Decode`` go out at the same time; the workers meet without the router. Several answers to one
   prompt are sent as one; from token 0 on each is carried by itself.
5. **Stream.** The first token comes from the prefill worker at once, all others from the decode worker, each exactly
   once and in order. Every arrival becomes a delta: detokenized, end tokens hidden, cut at a stop string, and in chats
   told apart into content, reasoning and tool calls.
6. **Survive.** When a worker dies or a hand-over fails, the relay goes back to 3 with the prompt and the tokens that
   were delivered; the client sees a pause.
   An embedding goes the same way with one leg, on a worker that computes prompts, and arrives at once.
7. **End.** Finish, a stop string, cancel, deadline and an error that nothing mends all leave the relay's block, which
   cancels the request on every worker that may still hold something, and then the ledger's, which counts the outcome.

A client that goes away cancels (or closes) the generator: that is step 7 from wherever the request is.
"""

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import ExitStack, aclosing
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

from contract.errors import ContextLengthError, InvalidRequestError, UnsupportedFieldError
from contract.requests import FinishReason
from router.answer import Answer, Delta, Prompt, Usage
from router.limits import MAX_PROMPT_TOKENS, check_cache_salt, check_limits, check_repeated
from router.merge_streams import merge_streams
from router.model_source import ModelSource
from router.registry import Registry
from router.request import (
    EmbeddingRequest,
    GenerationRequest,
    PreparedRequest,
    prepare,
    prepare_embedding,
    tokenize,
)
from router.request_run import RequestRun, RequestRuns
from router.request_tracker import RequestTracker
from router.round_robin import RoundRobin
from router.tasks import cooperatively
from router.tenancy import TenantRules
from router.tokenizing import TokenizerThreads
from text.model_card import ModelCard
from text.stop import StopAutomaton


class Pipeline:
    """Carries every request of HTTP and gRPC from its arrival to its end."""

    def __init__(
        self,
        models: ModelSource,
        registry: Registry,
        ledger: RequestTracker,
        relays: RequestRuns,
        tokenizers: TokenizerThreads,
        rules: TenantRules,
        timeout_seconds: float,
    ) -> None:
        self._models = models
        self._tokenizers = tokenizers
        self._registry = registry
        self._ledger = ledger
        self._relays = relays
        self._rules = rules
        self._timeout_seconds = timeout_seconds
        self._turns = RoundRobin()
        self._stops: WeakValueDictionary[tuple[str, ...], StopAutomaton] = WeakValueDictionary()

    async def generate(self, *asked: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """The answers as they are computed, one beside the other; ``index`` says whose a delta is.

        Every prompt has ``num_choices`` answers, one prompt's behind the other's. The last delta of each has
        ``finish_reason``, ``usage`` (what the prompt took is told with its first choice) and ``timings``. All are admitted
        and checked before one is sent. Close the generator (``contextlib.aclosing``) or cancel its task to end them early.
        Raises KvbatonError.
        """
        check_repeated(asked)
        await self._admit(asked[0], sum(len(one.choices) for one in asked))
        with ExitStack() as held:
            records = [
                [held.enter_context(self._ledger.open(one)) for _ in one.choices]
                async for one in cooperatively(asked)
            ]
            card = self._answering_card(asked[0].model)
            requests = await self._all_within_limits([self._prepare(one, card) for one in asked], card)
            unread = held.enter_context(self._relays.unread.open(asked[0].tenant))
            relays = [
                held.enter_context(self._relays.open(*each, unread))
                async for each in cooperatively(zip(requests, records, strict=True))
            ]
            first, *others = [self._answer(relay, card) for relay in chain.from_iterable(relays)]
            async with aclosing(merge_streams([first, *others]) if others else first) as deltas:
                async for delta in deltas:
                    yield delta

    async def embed(self, *asked: EmbeddingRequest) -> list[Delta]:
        """The embedding of each prompt, in order, with ``usage`` and ``timings``; all or none.

        Cancel its task to end it early. Raises KvbatonError.
        """
        await self._admit(asked[0], len(asked))
        with ExitStack() as held:
            records = [held.enter_context(self._ledger.open(one)) async for one in cooperatively(asked)]
            card = self._models.card_named(asked[0].model)
            preparing = [self._prepare_embedding(one, card) for one in asked]
            requests = await self._all_within_limits(preparing, card)
            unread = held.enter_context(self._relays.unread.open(asked[0].tenant))
            pairs = zip(requests, records, strict=True)
            relays = [
                held.enter_context(self._relays.open(request, [record], unread))[0]
                async for request, record in cooperatively(pairs)
            ]
            async with aclosing(merge_streams([self._embedding(relay) for relay in relays])) as deltas:
                found = [delta async for delta in deltas]
        return sorted(found, key=lambda delta: delta.index)

    async def _admit(self, first: GenerationRequest | EmbeddingRequest, num_requests: int) -> None:
        """Wait for the model and for the client's turn, and check that so many requests may wait. Raises KvbatonError."""
        await self._models.settled()
        await self._turns.take(first.tenant)
        self._ledger.check_admission(first, num_requests)

    def check(self, asked: GenerationRequest) -> PreparedRequest:
        """What ``generate`` would send, after all its checks; from any thread. Raises KvbatonError."""
        check_limits(asked)
        card = self._answering_card(asked.model)
        return self._prepared(asked, tokenize(asked, card, self._max_model_len(card)), card)

    async def num_prompt_tokens(self, asked: GenerationRequest) -> int:
        """Return how many tokens the prompt of ``asked`` has, also where that is more than the model takes.

        Raises KvbatonError, ContextLengthError among them for a text that is too long to be tokenized.
        """
        check_limits(asked)
        return len(await self._tokenized(asked, self._models.card_named(asked.model)))

    def check_embedding(self, asked: EmbeddingRequest) -> PreparedRequest:
        """What ``embed`` would send, after all its checks; from any thread. Raises KvbatonError."""
        check_cache_salt(asked.cache_salt)
        card = self._models.card_named(asked.model)
        return self._prepared_embedding(asked, tokenize(asked, card, self._max_model_len(card)), card)

    def _answering_card(self, name: str | None) -> ModelCard:
        card = self._models.card_named(name)
        if self._registry.embeds_only:
            raise UnsupportedFieldError(
                f"the model {card.name} has no output head: it gives embeddings only (/v1/embeddings, Embed)",
                param="model",
            )
        return card

    async def _answer(self, relay: RequestRun, card: ModelCard) -> AsyncGenerator[Delta, None]:
        request = relay.request
        record = relay.record
        answer = Answer(request, card)
        while not answer.is_finished:
            is_first = answer.num_tokens == 0
            delta = answer.push(await relay.next())
            if is_first:
                delta.prompt = Prompt(request.prompt_token_ids, relay.report.prompt_logprobs)
            record.arrived(delta)
            if delta.finish_reason:
                relay.close()
                record.finish(delta, delta.finish_reason, _usage(relay, answer), relay.report)
            yield delta

    async def _embedding(self, relay: RequestRun) -> AsyncGenerator[Delta, None]:
        arrival = await relay.next()
        relay.close()
        usage = Usage(
            num_prompt_tokens=len(relay.request.prompt_token_ids),
            num_completion_tokens=0,
            num_cached_tokens=relay.report.num_cached_tokens,
        )
        delta = Delta(finish_reason=arrival.finish_reason, embedding=arrival.embedding)
        relay.record.finish(delta, FinishReason.STOP, usage, relay.report)
        yield delta

    async def _all_within_limits(
        self, preparing: list[Coroutine[Any, Any, PreparedRequest]], card: ModelCard
    ) -> list[PreparedRequest]:
        """Prepare a request's prompts one after the other, up to the tokens that they may have together."""
        prepared: list[PreparedRequest] = []
        room = max(MAX_PROMPT_TOKENS, self._max_model_len(card))
        try:
            while preparing and room >= 0:
                prepared.append(await preparing.pop(0))
                room -= len(prepared[-1].prompt_token_ids)
        finally:
            for one in preparing:
                one.close()
        if room < 0:
            raise InvalidRequestError(
                f"the prompts of one request have more than {MAX_PROMPT_TOKENS} tokens together; send fewer"
            )
        return prepared

    def _max_model_len(self, card: ModelCard) -> int:
        return self._registry.recent_max_model_len(card.max_model_len)

    async def _tokenized(self, asked: GenerationRequest | EmbeddingRequest, card: ModelCard) -> list[int]:
        return await self._tokenizers.tokenize(asked, card, self._max_model_len(card))

    async def _prepare(self, asked: GenerationRequest, card: ModelCard) -> PreparedRequest:
        check_limits(asked)
        return self._prepared(asked, await self._tokenized(asked, card), card)

    async def _prepare_embedding(self, asked: EmbeddingRequest, card: ModelCard) -> PreparedRequest:
        check_cache_salt(asked.cache_salt)
        return self._prepared_embedding(asked, await self._tokenized(asked, card), card)

    def _prepared(self, asked: GenerationRequest, prompt_ids: list[int], card: ModelCard) -> PreparedRequest:
        stop = self._stops.setdefault(asked.stop, StopAutomaton(asked.stop))
        make = partial(prepare, asked, prompt_ids, card, timeout_seconds=self._timeout_seconds, stop=stop)
        return self._rules.apply(self._within_length(make, card))

    def _prepared_embedding(
        self, asked: EmbeddingRequest, prompt_ids: list[int], card: ModelCard
    ) -> PreparedRequest:
        make = partial(prepare_embedding, asked, prompt_ids, card, timeout_seconds=self._timeout_seconds)
        return self._rules.apply(self._within_length(make, card))

    def _within_length(self, make: Callable[..., PreparedRequest], card: ModelCard) -> PreparedRequest:
        """Prepare what fits an attached worker for those, and what fitted one that has gone a moment ago for that one."""
        now = self._registry.max_model_len(card.max_model_len)
        recent = self._max_model_len(card)
        try:
            return make(max_model_len=now)
        except ContextLengthError:
            if recent <= now:
                raise
        return make(max_model_len=recent)


def _usage(relay: RequestRun, answer: Answer) -> Usage:
    """What the answer took; the prompt, which several answers share, is told with the first of them."""
    pays_prompt = relay.request.choice == 0
    return Usage(
        num_prompt_tokens=len(relay.request.prompt_token_ids) if pays_prompt else 0,
        num_completion_tokens=answer.num_tokens,
        num_cached_tokens=relay.report.num_cached_tokens if pays_prompt else 0,
        num_reasoning_tokens=answer.num_reasoning_tokens,
    )
