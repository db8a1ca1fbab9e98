"""A client's request: one object for HTTP and gRPC, so that both mean the same by construction."""

import os
import time
from collections.abc import Iterable
from typing import TypeVar

import msgspec
from msgspec import structs

from contract.errors import InvalidRequestError
from contract.requests import MAX_CHOICES, PoolingParams
from contract.sampling import RequestedSampling
from text.chat import Chat
from text.length_bound import check_length_fits, check_text_fits
from text.model_card import ModelCard

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for /v1/completions."""
BACKGROUND_PRIORITY = -(2**31)
"""The priority of requests that are admitted only when no other request waits."""


class GenerationRequest(RequestedSampling, frozen=True, kw_only=True):
    """A request as the client sent it. None means: not given, take the model's or the documented default.

    request_id: made by the router, and never used for another request; a client's own name for its request is not one.
    prompt: text, token ids, or a chat. num_choices: answers to it. logprobs: how many alternatives of each token the client
    receives. rates_tokens: each token's log probability is needed, even if the client receives none. default_max_tokens:
    used if ``max_tokens`` is None; None is all that fits the model. arrival: on the router's monotonic clock. grammar_field:
    the field of the client's grammar, for errors. timeout_seconds: the client's own deadline. tenant: digest of the API key
    that was presented; "" without keys. is_background: a batch sends it, so it does not count in the router's queue. family:
    id of the client's request that this prompt is a part of; "" for its own id.
    """

    request_id: str
    prompt: str | tuple[int, ...] | Chat
    model: str | None = None
    default_max_tokens: int | None = None
    num_choices: int = 1
    rates_tokens: bool = False
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    grammar_field: str = "grammar"
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    is_background: bool = False
    family: str = ""
    timeout_seconds: float | None = None
    arrival: float = msgspec.field(default_factory=time.monotonic)

    @property
    def choices(self) -> range:
        """The numbers of its answers. Raises InvalidRequestError for none, or too many."""
        if not 1 <= self.num_choices <= MAX_CHOICES:
            raise InvalidRequestError(f"n is {self.num_choices}; it must lie in 1..{MAX_CHOICES}", param="n")
        return range(self.num_choices)


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the embedding of a prompt, as the client sent it.

    dimensions: how many numbers the embedding must have; None: not given. pooling: how the prompt's hidden states become
    one vector. The other fields are those of GenerationRequest.
    """

    request_id: str
    prompt: str | tuple[int, ...]
    model: str | None = None
    dimensions: int | None = None
    pooling: PoolingParams = PoolingParams()
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    is_background: bool = False
    family: str = ""
    timeout_seconds: float | None = None
    arrival: float = msgspec.field(default_factory=time.monotonic)

    @property
    def choices(self) -> range:
        """Its one answer."""
        return range(1)


_Request = TypeVar("_Request", GenerationRequest, EmbeddingRequest)


def for_prompts(first: _Request, prompts: Iterable[str | tuple[int, ...]]) -> list[_Request]:
    """Return the request, and a copy of it for each of ``prompts`` under an id of its own."""
    name = first.request_id
    requests = [first]
    for number, prompt in enumerate(prompts, 1):
        # each prompt is a request of its own at the workers, and its family keeps them together in the queue
        requests.append(structs.replace(first, request_id=f"{name}-{number}", prompt=prompt, family=name))
    return requests


def new_request_id(prefix: str) -> str:
    """Return a new id, which all processes use for the request. A dash joins the prefix, unless it ends with "_"."""
    return f"{prefix}{'' if prefix.endswith('_') else '-'}{os.urandom(16).hex()}"


def tokenize(request: GenerationRequest | EmbeddingRequest, card: ModelCard, max_model_len: int) -> list[int]:
    """Return the prompt as token ids: chats by the model's template, text with its special tokens, ids as they are.

    Raises ContextLengthError for a text that certainly does not fit, before it is tokenized; InvalidRequestError for a
    chat with a model that has no chat template.
    """
    if isinstance(request.prompt, tuple):
        return list(request.prompt)
    if isinstance(request.prompt, str):
        param = "prompt" if isinstance(request, GenerationRequest) else "input"
        check_text_fits(request.prompt, card.tokenizer.length_bound, max_model_len, param)
        return card.tokenizer.encode(request.prompt)
    if card.chat_template is None:
        raise InvalidRequestError(
            f"the model {card.name} has no chat template; use /v1/completions", param="messages"
        )
    num_characters = request.prompt.num_certain_characters()
    check_length_fits(num_characters, card.tokenizer.length_bound, max_model_len, "messages")
    prompt = card.chat_template.prompt(request.prompt)
    check_text_fits(prompt.text, card.tokenizer.length_bound, max_model_len, "messages")
    return card.encode_prompt(prompt)
