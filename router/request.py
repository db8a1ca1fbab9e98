"""What a client asks for: one object for HTTP and gRPC, so that both mean the same by construction."""

import secrets
import time
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TypeVar

from msgspec import structs

from contract.errors import ContextLengthError, InvalidRequestError
from contract.requests import MAX_CHOICES, EngineRequest, check_token_ids
from contract.sampling import Grammar, SamplingParams, choice_seed
from text.chat import Chat
from text.length_bound import check_length_fits, check_text_fits
from text.model_card import ModelCard
from text.stop import StopAutomaton

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for /v1/completions."""
BACKGROUND_PRIORITY = -(2**31)
"""The priority of work that goes only when no other request waits."""
_ANSWER_ROOM = 256
_INT64 = 2**63
_INT32 = 2**31


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A request as the client sent it. None means: not given, take the model's or the documented default.

    request_id: no other request's, ever: what a client calls its request is not one. prompt: text, token ids, or a chat.
    num_choices: answers to it. logprobs: how many alternatives the client sees of each token. rates_tokens: each token's log
    probability is needed, even if it sees none. default_max_tokens: used where ``max_tokens`` is None; None is all that fits
    the model. arrival: on the router's monotonic clock. grammar_field: where the client gave its grammar, for errors.
    timeout_seconds: the client's own deadline. tenant: digest of the API key that was presented; "" without keys.
    is_background: a batch sends it; it does not count in the router's queue.
    family: id of the client's request that this prompt is a part of; "" for its own id.
    """

    request_id: str
    prompt: str | tuple[int, ...] | Chat
    model: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    min_tokens: int = 0
    num_choices: int = 1
    rates_tokens: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    grammar_field: str = "grammar"
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    is_background: bool = False
    family: str = ""
    timeout_seconds: float | None = None
    arrival: float = field(default_factory=time.monotonic)

    @property
    def choices(self) -> range:
        """Its answers. Raises InvalidRequestError for none, or too many."""
        if not 1 <= self.num_choices <= MAX_CHOICES:
            raise InvalidRequestError(f"n is {self.num_choices}; it must lie in 1..{MAX_CHOICES}", param="n")
        return range(self.num_choices)


@dataclass(frozen=True, kw_only=True)
class EmbeddingRequest:
    """A prompt of which the client wants the embedding. dimensions: how many numbers it shall have; None: not given.

    tenant: digest of the API key that was presented; "" without keys.
    is_background: a batch sends it; it does not count in the router's queue.
    """

    request_id: str
    prompt: str | tuple[int, ...]
    model: str | None = None
    dimensions: int | None = None
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    is_background: bool = False
    family: str = ""
    timeout_seconds: float | None = None
    arrival: float = field(default_factory=time.monotonic)


_Asked = TypeVar("_Asked", GenerationRequest, EmbeddingRequest)


@dataclass(frozen=True, kw_only=True)
class PreparedRequest:
    """A request with its prompt as token ids and every default filled in; it fits the model.

    tenant: the client, "" without API keys. family: id of the client's request, which may hold several prompts.
    fills_model: the answer may be as long as the model allows. chat: what the prompt was made of; None for a text. choice:
    which answer to the prompt it asks for; ``sampling`` has that one's seed. is_embedding: nothing is drawn, so
    ``sampling``, ``stop`` and ``eos_token_ids`` are not read. deadline: when it ends with an error at the latest, on the
    router's monotonic clock.
    """

    request_id: str
    prompt_token_ids: list[int]
    priority: int
    cache_salt: str
    arrival: float
    deadline: float
    tenant: str = ""
    family: str = ""
    fills_model: bool = False
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StopAutomaton = field(default_factory=lambda: StopAutomaton(()))
    eos_token_ids: tuple[int, ...] = ()
    chat: Chat | None = None
    choice: int = 0
    is_embedding: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def of_choice(self, choice: int) -> "PreparedRequest":
        """The same for another answer to the prompt; called on the first one."""
        seed = choice_seed(self.sampling.seed, choice)
        return replace(self, choice=choice, sampling=structs.replace(self.sampling, seed=seed))

    @property
    def max_length(self) -> int:
        """Tokens that prompt and answer have together at the most."""
        return len(self.prompt_token_ids) + (0 if self.is_embedding else self.sampling.max_tokens)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that a decode worker shall have room for beside the prompt when the request is bound to it."""
        return 0 if self.is_embedding else min(self.sampling.max_tokens, _ANSWER_ROOM)


def for_prompts(first: _Asked, prompts: Iterable[str | tuple[int, ...]]) -> list[_Asked]:
    """The request, and the same for each of ``prompts`` under an id of its own."""
    asked = [first]
    for number, prompt in enumerate(prompts, 1):
        other = copy(first)  # ``replace`` takes 20 µs, which are too many for a thousand prompts
        vars(other).update(request_id=f"{first.request_id}-{number}", prompt=prompt, family=first.request_id)
        asked.append(other)
    return asked


def new_request_id(prefix: str) -> str:
    """A fresh id, the same in every process that meets the request. A dash joins the prefix, unless it ends with "_"."""
    return f"{prefix}{'' if prefix.endswith('_') else '-'}{secrets.token_hex(16)}"


def tokenize(asked: GenerationRequest | EmbeddingRequest, card: ModelCard, max_model_len: int) -> list[int]:
    """Return the prompt as token ids: chats by the model's template, text with its special tokens, ids as they are.

    Raises ContextLengthError for a text that certainly does not fit, before it is tokenized; InvalidRequestError for a
    chat with a model that has no chat template.
    """
    if isinstance(asked.prompt, tuple):
        return list(asked.prompt)
    if isinstance(asked.prompt, str):
        param = "prompt" if isinstance(asked, GenerationRequest) else "input"
        check_text_fits(asked.prompt, card.tokenizer.length_bound, max_model_len, param)
        return card.tokenizer.encode(asked.prompt)
    if card.chat_template is None:
        raise InvalidRequestError(
            f"the model {card.name} has no chat template; use /v1/completions", param="messages"
        )
    num_characters = asked.prompt.num_certain_characters()
    check_length_fits(num_characters, card.tokenizer.length_bound, max_model_len, "messages")
    prompt = card.chat_template.prompt(asked.prompt)
    check_text_fits(prompt.text, card.tokenizer.length_bound, max_model_len, "messages")
    return card.encode_prompt(prompt)


def prepare(
    asked: GenerationRequest,
    prompt_ids: list[int],
    card: ModelCard,
    max_model_len: int,
    timeout_seconds: float,
    stop: StopAutomaton | None = None,
) -> PreparedRequest:
    """Fill every default and check every range. stop: of its stop strings, where another prompt has the same ones.

    Raises InvalidRequestError, ContextLengthError among them.
    """
    if asked.stop and not all(asked.stop):
        raise InvalidRequestError("stop holds an empty string; it would end every answer", param="stop")
    _check_priority(asked.priority)
    sampling = SamplingParams(
        temperature=card.temperature if asked.temperature is None else asked.temperature,
        top_k=card.top_k if asked.top_k is None else asked.top_k,
        top_p=card.top_p if asked.top_p is None else asked.top_p,
        seed=_checked_seed(asked.seed),
        max_tokens=_max_tokens(asked, len(prompt_ids), max_model_len),
        min_tokens=asked.min_tokens,
        stop_token_ids=asked.stop_token_ids,
        ignore_eos=asked.ignore_eos,
        logprobs=0 if asked.rates_tokens and asked.logprobs is None else asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        min_p=card.min_p if asked.min_p is None else asked.min_p,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=(
            card.repetition_penalty if asked.repetition_penalty is None else asked.repetition_penalty
        ),
        logit_bias=asked.logit_bias,
        allowed_token_ids=asked.allowed_token_ids,
        grammar=asked.grammar,
    )
    EngineRequest(
        request_id=asked.request_id,
        prompt_token_ids=prompt_ids,
        sampling=sampling,
        num_choices=asked.num_choices,
    ).check(card.vocab_size)
    return PreparedRequest(
        request_id=asked.request_id,
        prompt_token_ids=prompt_ids,
        sampling=sampling,
        stop=stop or StopAutomaton(asked.stop),
        eos_token_ids=card.eos_token_ids,
        priority=asked.priority,
        cache_salt=asked.cache_salt,
        arrival=asked.arrival,
        tenant=asked.tenant,
        family=asked.family or asked.request_id,
        deadline=asked.arrival + min(timeout_seconds, asked.timeout_seconds or timeout_seconds),
        fills_model=asked.max_tokens is None and asked.default_max_tokens is None,
        chat=asked.prompt if isinstance(asked.prompt, Chat) else None,
        include_stop_str_in_output=asked.include_stop_str_in_output,
        skip_special_tokens=asked.skip_special_tokens,
    )


def prepare_embedding(
    asked: EmbeddingRequest,
    prompt_ids: list[int],
    card: ModelCard,
    max_model_len: int,
    timeout_seconds: float,
) -> PreparedRequest:
    """The same for an embedding. Raises InvalidRequestError about ``input``, ``dimensions`` or ``priority``."""
    _check_priority(asked.priority)
    if asked.dimensions is not None and asked.dimensions != card.hidden_size:
        own = "its own number only" if card.hidden_size is None else f"{card.hidden_size} only"
        raise InvalidRequestError(
            f"dimensions is {asked.dimensions}; the model {card.name} gives embeddings of {own}: leave it out",
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
    return PreparedRequest(
        request_id=asked.request_id,
        prompt_token_ids=prompt_ids,
        priority=asked.priority,
        cache_salt=asked.cache_salt,
        arrival=asked.arrival,
        tenant=asked.tenant,
        family=asked.family or asked.request_id,
        deadline=asked.arrival + min(timeout_seconds, asked.timeout_seconds or timeout_seconds),
        is_embedding=True,
    )


def _check_priority(priority: int) -> None:
    if not -_INT32 <= priority < _INT32:
        raise InvalidRequestError(
            f"priority is {priority}; it must lie in {-_INT32}..{_INT32 - 1}", param="priority"
        )


def _checked_seed(seed: int | None) -> int:
    if seed is None:
        return secrets.randbits(63)
    if not -_INT64 <= seed < _INT64:
        raise InvalidRequestError(f"seed is {seed}; it must lie in {-_INT64}..{_INT64 - 1}", param="seed")
    return seed


def _max_tokens(asked: GenerationRequest, num_prompt: int, max_model_len: int) -> int:
    room = max_model_len - num_prompt
    if asked.max_tokens is not None and asked.max_tokens < 1:
        raise InvalidRequestError(
            f"max_tokens is {asked.max_tokens}; it must be 1 or more", param="max_tokens"
        )
    wanted = 1 if asked.max_tokens is None else asked.max_tokens
    if wanted > room:
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{num_prompt + wanted} tokens ({num_prompt} in the prompt, {wanted} in the completion). "
            "Please reduce the length of the prompt or of the completion.",
            param="messages" if isinstance(asked.prompt, Chat) else "prompt",
        )
    if asked.max_tokens is not None:
        return asked.max_tokens
    return room if asked.default_max_tokens is None else min(room, asked.default_max_tokens)
