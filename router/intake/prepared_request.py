"""A request with its prompt as token ids, every default filled in and every range checked."""

from typing import Any

import msgspec
from msgspec import structs

from contract.errors import ContextLengthError, InvalidRequestError
from contract.requests import EngineRequest, PoolingParams, check_token_ids
from contract.sampling import SamplingParams
from router.intake.request import EmbeddingRequest, GenerationRequest
from router.routing.legs import EMBEDDING, GENERATION, RequestPlan
from text.chat import Chat
from text.model_card import ModelCard
from text.stop import StopAutomaton

NO_STOPS = StopAutomaton(())
_ANSWER_ROOM = 256
"""Tokens of an answer that are kept free at most: most answers are shorter than their ``max_tokens``."""
_INT32 = 2**31


class PreparedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request with its prompt as token ids and every default filled in; it fits the model.

    plan: the legs that it needs. If none of them emits tokens, ``sampling``, ``stop`` and ``eos_token_ids`` are not read.
    tenant: the client, "" without API keys. family: id of the client's request, which may hold several prompts.
    fills_model: the answer may be as long as the model allows. chat: the conversation that the prompt was rendered from;
    None for a text. choice: which answer to the prompt it is; ``sampling`` has that one's seed. deadline: when it ends with
    an error at the latest, on the router's monotonic clock. vocab_size: the token ids of an answer are below it.
    pooling: read for an embedding only.
    """

    request_id: str
    prompt_token_ids: list[int]
    priority: int
    cache_salt: str
    arrival: float
    deadline: float
    plan: RequestPlan = GENERATION
    tenant: str = ""
    family: str = ""
    fills_model: bool = False
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)
    stop: StopAutomaton = NO_STOPS
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = 2**32
    pooling: PoolingParams = PoolingParams()
    chat: Chat | None = None
    choice: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def of_choice(self, choice: int) -> "PreparedRequest":
        """Return the request for an answer to the prompt. Called on the request for the first one."""
        if choice == self.choice:
            return self
        return structs.replace(self, choice=choice, sampling=self.sampling.of_choice(choice))

    @property
    def max_length(self) -> int:
        """Tokens that prompt and answer have together at the most."""
        return len(self.prompt_token_ids) + self._max_answer_tokens

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that a decode worker must have room for beside the prompt when the request is admitted."""
        return min(self._max_answer_tokens, _ANSWER_ROOM)

    @property
    def _max_answer_tokens(self) -> int:
        return self.sampling.max_tokens if self.plan.emits_tokens else 0


def prepare(
    request: GenerationRequest,
    prompt_ids: list[int],
    card: ModelCard,
    max_model_len: int,
    timeout_seconds: float,
    stop: StopAutomaton = NO_STOPS,
    *,
    shortens_answers: bool = True,
) -> PreparedRequest:
    """Fill in every default and check every range.

    stop: the automaton of its stop strings. shortens_answers: a limit of the answer that is larger than the room behind the
    prompt becomes that room; else it is an error. Raises InvalidRequestError, and
    ContextLengthError, which is one.
    """
    if request.stop and not all(request.stop):
        raise InvalidRequestError("stop holds an empty string; it would end every answer", param="stop")
    _check_priority(request.priority)
    sampling = request.completed(
        card.defaults,
        _max_tokens(request, len(prompt_ids), max_model_len, shortens_answers),
        rates_tokens=request.rates_tokens,
    )
    # the engine's own checks, made before the request waits for workers
    EngineRequest(
        request_id=request.request_id,
        prompt_token_ids=prompt_ids,
        sampling=sampling,
        num_choices=request.num_choices,
    ).check(card.vocab_size)
    return PreparedRequest(
        **_common_fields(request, prompt_ids, timeout_seconds),
        sampling=sampling,
        stop=stop,
        eos_token_ids=card.eos_token_ids,
        vocab_size=card.vocab_size,
        fills_model=request.max_tokens is None and request.default_max_tokens is None,
        chat=request.prompt if isinstance(request.prompt, Chat) else None,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
    )


def prepare_embedding(
    request: EmbeddingRequest,
    prompt_ids: list[int],
    card: ModelCard,
    max_model_len: int,
    timeout_seconds: float,
) -> PreparedRequest:
    """Check a request for an embedding. Raises InvalidRequestError that names the field at fault."""
    _check_priority(request.priority)
    request.pooling.check()
    if request.dimensions is not None and request.dimensions != card.hidden_size:
        own = "its own number only" if card.hidden_size is None else f"{card.hidden_size} only"
        raise InvalidRequestError(
            f"dimensions is {request.dimensions}; the model {card.name} gives embeddings of {own}: leave it out",
            param="dimensions",
        )
    if len(prompt_ids) > max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens. However, an input has "
            f"{len(prompt_ids)} tokens. Please reduce its length.",
            param="input",
        )
    if not prompt_ids:
        raise InvalidRequestError("an input is empty; it needs at least one token", param="input")
    check_token_ids(prompt_ids, card.vocab_size, param="input")
    common = _common_fields(request, prompt_ids, timeout_seconds)
    return PreparedRequest(**common, plan=EMBEDDING, pooling=request.pooling)


def _common_fields(
    request: GenerationRequest | EmbeddingRequest, prompt_ids: list[int], timeout_seconds: float
) -> dict[str, Any]:
    """Return the fields of ``PreparedRequest`` that answers and embeddings have in common."""
    return {
        "request_id": request.request_id,
        "prompt_token_ids": prompt_ids,
        "priority": request.priority,
        "cache_salt": request.cache_salt,
        "arrival": request.arrival,
        "deadline": request.arrival + min(timeout_seconds, request.timeout_seconds or timeout_seconds),
        "tenant": request.tenant,
        "family": request.family or request.request_id,
    }


def _check_priority(priority: int) -> None:
    if not -_INT32 <= priority < _INT32:
        raise InvalidRequestError(
            f"priority is {priority}; it must lie in {-_INT32}..{_INT32 - 1}", param="priority"
        )


def _max_tokens(
    request: GenerationRequest, num_prompt: int, max_model_len: int, shortens_answers: bool
) -> int:
    room = max_model_len - num_prompt
    request.check_limit()
    # an answer has one token at least; a prompt that leaves no room for it is too long
    wanted = 1 if request.max_tokens is None or shortens_answers else request.max_tokens
    if wanted > room:
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{num_prompt + wanted} tokens ({num_prompt} in the prompt, {wanted} in the completion). "
            "Please reduce the length of the prompt or of the completion.",
            param="messages" if isinstance(request.prompt, Chat) else "prompt",
        )
    if request.max_tokens is not None:
        return min(room, request.max_tokens)
    return room if request.default_max_tokens is None else min(room, request.default_max_tokens)
