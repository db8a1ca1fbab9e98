"""How much a request may hold of what nothing else bounds; the same for HTTP and gRPC."""

from collections.abc import Sequence, Sized

from contract.errors import InvalidRequestError
from router.request import GenerationRequest
from text.chat import Chat

MAX_MESSAGES = 4096
MAX_PROMPTS = 2048
MAX_PROMPT_TOKENS = 2**20
"""Of all prompts of one request together; one prompt may have what fits the model in any case."""
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_ALL_STOP_CHARACTERS = 4096
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_REPEATED_BYTES = 2**25
"""Of what is sent with each prompt of one request, all of them together."""
MAX_CACHE_SALT_CHARACTERS = 1024
"""It goes to workers with every prompt of a request."""


def check_limits(asked: GenerationRequest) -> None:
    """Raise InvalidRequestError that names the first field that holds too much."""
    if isinstance(asked.prompt, Chat):
        _at_most(MAX_MESSAGES, asked.prompt.messages, "messages", "messages")
    _at_most(MAX_STOPS, asked.stop, "stop", "strings")
    longest = max((len(text) for text in asked.stop), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise InvalidRequestError(
            f"stop holds a string of {longest} characters; the limit is {MAX_STOP_CHARACTERS}", param="stop"
        )
    if (together := sum(map(len, asked.stop))) > MAX_ALL_STOP_CHARACTERS:
        raise InvalidRequestError(
            f"the strings of stop have {together} characters together; the limit is {MAX_ALL_STOP_CHARACTERS}",
            param="stop",
        )
    _at_most(MAX_ALLOWED_TOKEN_IDS, asked.allowed_token_ids, "allowed_token_ids", "token ids")
    _at_most(MAX_STOP_TOKEN_IDS, asked.stop_token_ids, "stop_token_ids", "token ids")
    _at_most(MAX_LOGIT_BIASES, asked.logit_bias, "logit_bias", "entries")
    check_cache_salt(asked.cache_salt)


def check_repeated(asked: Sequence[GenerationRequest]) -> None:
    """Raise InvalidRequestError where what each of the prompts takes to its workers is too much for all of them."""
    one = asked[0]
    num_bytes = len(one.grammar.text if one.grammar else "") + 4 * len(one.allowed_token_ids)
    if len(asked) > 1 and num_bytes * len(asked) > MAX_REPEATED_BYTES:
        raise InvalidRequestError(
            f"grammar and allowed_token_ids have {num_bytes} bytes, and go to workers with each of {len(asked)} prompts; "
            f"the limit is {MAX_REPEATED_BYTES} together: send fewer prompts in one request",
            param="prompt",
        )


def check_cache_salt(cache_salt: str) -> None:
    """Raise InvalidRequestError for one that is too long."""
    _at_most(MAX_CACHE_SALT_CHARACTERS, cache_salt, "cache_salt", "characters")


def _at_most(limit: int, held: Sized, param: str, things: str) -> None:
    if len(held) > limit:
        raise InvalidRequestError(f"{param} has {len(held)} {things}; the limit is {limit}", param=param)
