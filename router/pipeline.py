"""The life of a request, on one page.

1. **Admit.** The ledger takes the request in, or the client is told to come back later.
2. **Tokenize.** Chat template and tokenizer make token ids; defaults are filled in, the seed is drawn, ranges and the
   model's length are checked. From here on nothing but the answer is text.
3. **Bind.** A policy picks a prefill and a decode worker (or one that is both) from the workers of this moment.
4. **Send.** Entering the attempt sends ``Prefill`` and ``Decode`` at the same time; they name each other and meet
   without the router.
5. **Stream.** Token 0 comes from the prefill worker at once, all others from the decode worker, each exactly once and
   in order. Every arrival becomes a delta: detokenized, end tokens hidden, cut at a stop string.
6. **End.** Finish, a stop string, cancel, deadline, error and a worker's death all leave the attempt's block, which
   cancels the request on every worker that may still hold something, and then the ledger's, which counts the outcome.

A client that goes away cancels (or closes) the generator: that is step 6 from wherever the request is.
"""

import asyncio
from collections.abc import AsyncGenerator

from contract.errors import NotFoundError
from router.answer import Answer, Delta, Usage
from router.attempt import Attempt
from router.ledger import Ledger
from router.model_source import ModelSource
from router.policy import place
from router.registry import Registry
from router.request import GenerationRequest, PreparedRequest, prepare, tokenize
from router.tasks import TaskSet
from text.model_card import ModelCard

_LONG_PROMPT_CHARACTERS = 10_000


class Pipeline:
    """Carries every request of HTTP and gRPC from its arrival to its end."""

    def __init__(
        self, models: ModelSource, registry: Registry, ledger: Ledger, tasks: TaskSet, timeout_seconds: float
    ) -> None:
        self._models = models
        self._registry = registry
        self._ledger = ledger
        self._tasks = tasks
        self._timeout_seconds = timeout_seconds
        self._turn = 0

    async def generate(self, asked: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """The answer as it is computed; the last delta has ``finish_reason``, ``usage`` and ``timings``.

        Close the generator (``contextlib.aclosing``) or cancel its task to end the request early. Raises KvbatonError.
        """
        with self._ledger.open(asked) as record:
            card = self._model_asked_for(asked.model)
            request = await self._prepare(asked, card)
            with self._bind(request) as attempt:
                record.bound()
                answer = Answer(request, card.tokenizer)
                while not answer.is_finished:
                    delta = answer.push(await attempt.next())
                    record.arrived(delta)
                    if delta.finish_reason:
                        attempt.close()
                        usage = Usage(
                            num_prompt_tokens=len(request.prompt_token_ids),
                            num_completion_tokens=answer.num_tokens,
                            num_cached_tokens=attempt.report.num_cached_tokens,
                        )
                        record.finish(delta, delta.finish_reason, usage, attempt.report)
                    yield delta

    def _model_asked_for(self, name: str | None) -> ModelCard:
        card = self._models.card()
        if name and name != card.name:
            raise NotFoundError(
                f"The model `{name}` does not exist; this service has `{card.name}`.",
                param="model",
                code="model_not_found",
            )
        return card

    async def _prepare(self, asked: GenerationRequest, card: ModelCard) -> PreparedRequest:
        """Long texts are tokenized in a thread, so that they do not hold up the tokens of others."""
        if isinstance(asked.prompt, tuple) or len(str(asked.prompt)) < _LONG_PROMPT_CHARACTERS:
            prompt_ids = tokenize(asked, card)
        else:
            prompt_ids = await asyncio.to_thread(tokenize, asked, card)
        return prepare(
            asked, prompt_ids, card, self._registry.max_model_len(card.max_model_len), self._timeout_seconds
        )

    def _bind(self, request: PreparedRequest) -> Attempt:
        placement = place(self._registry.snapshot(), self._turn)
        self._turn += 1
        prefill = self._registry.get(placement.prefill) if placement.prefill else None
        return Attempt(request, prefill, self._registry.get(placement.decode), self._tasks)
