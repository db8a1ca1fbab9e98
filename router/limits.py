"""Limits on the parts of a request that nothing else bounds; the same for HTTP and gRPC."""

from collections.abc import Sequence, Sized

from contract.errors import InvalidRequestError
from router.request import EmbeddingRequest, GenerationRequest
from text.chat import Chat

MAX_MESSAGES = 4096
MAX_PROMPTS = 2048
MAX_PROMPT_TOKENS = 2**20
"""Tokens of all prompts of one request together. A single prompt may have what fits the model in any case."""
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_ALL_STOP_CHARACTERS = 4096
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_REPEATED_BYTES = 2**25
"""Bytes of what is sent again with each prompt of one request, all prompts together."""
MAX_CACHE_SALT_CHARACTERS = 1024
"""The salt is sent to workers with every prompt of a request."""


def check_limits(request: GenerationRequest | EmbeddingRequest) -> None:
    """Raise InvalidRequestError that names the first field that is too large."""
    if isinstance(request, GenerationRequest):
        _check_generation(request)
    _at_most(MAX_CACHE_SALT_CHARACTERS, request.cache_salt, "cache_salt", "characters")


def _check_generation(request: GenerationRequest) -> None:
    if isinstance(request.prompt, Chat):
        _at_most(MAX_MESSAGES, request.prompt.messages, "messages", "messages")
    if request.stop:
        _check_stops(request.stop)
    if request.allowed_token_ids:
        _at_most(MAX_ALLOWED_TOKEN_IDS, request.allowed_token_ids, "allowed_token_ids", "token ids")
    if request.stop_token_ids:
        _at_most(MAX_STOP_TOKEN_IDS, request.stop_token_ids, "stop_token_ids", "token ids")
    if request.logit_bias:
        _at_most(MAX_LOGIT_BIASES, request.logit_bias, "logit_bias", "entries")


def _check_stops(stops: Sequence[str]) -> None:
    _at_most(MAX_STOPS, stops, "stop", "strings")
    longest = max(map(len, stops))
    if longest > MAX_STOP_CHARACTERS:
        raise InvalidRequestError(
            f"stop holds a string of {longest} characters; the limit is {MAX_STOP_CHARACTERS}", param="stop"
        )
    if (together := sum(map(len, stops))) > MAX_ALL_STOP_CHARACTERS:
        raise InvalidRequestError(
            f"the strings of stop have {together} characters together; the limit is {MAX_ALL_STOP_CHARACTERS}",
            param="stop",
        )


def check_repeated(requests: Sequence[GenerationRequest]) -> None:
    """Raise InvalidRequestError if the prompts of one request send too much to workers beside their tokens."""
    one = requests[0]
    num_bytes = len(one.grammar.text if one.grammar else "") + 4 * len(one.allowed_token_ids)
    if len(requests) > 1 and num_bytes * len(requests) > MAX_REPEATED_BYTES:
        raise InvalidRequestError(
            f"grammar and allowed_token_ids have {num_bytes} bytes, and go to workers with each of {len(requests)} prompts; "
            f"the limit is {MAX_REPEATED_BYTES} together: send fewer prompts in one request",
            param="prompt",
        )


def _at_most(limit: int, held: Sized, param: str, things: str) -> None:
    if len(held) > limit:
        raise InvalidRequestError(f"{param} has {len(held)} {things}; the limit is {limit}", param=param)
