"""Limits on one client: the parts of its requests, priority, time on the event loop, and whose cached KV it uses."""

import asyncio
import math
import time
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from hashlib import sha256

from msgspec import structs

from contract.errors import InvalidRequestError
from router.intake.prepared_request import PreparedRequest
from router.intake.request import BACKGROUND_PRIORITY, EmbeddingRequest, GenerationRequest
from text.chat import Chat

_DOMAIN = b"kvbaton.cache_salt.v1"


@dataclass(frozen=True)
class TenantRules:
    """The rules for clients.

    shares_prefix_cache: clients with different API keys reuse each other's cached prompts. max_priority: a higher priority
    counts as this one. is_lower_first: clients give the first requests the lowest numbers; ``max_priority`` is then that of
    the number's negative.
    """

    shares_prefix_cache: bool = False
    max_priority: int = 100
    is_lower_first: bool = False

    def apply(self, request: PreparedRequest) -> PreparedRequest:
        """Return the request as it is queued and sent to workers."""
        salt = request.cache_salt
        is_turned = self.is_lower_first and request.priority != BACKGROUND_PRIORITY
        priority = min(-request.priority if is_turned else request.priority, self.max_priority)
        if request.tenant and not self.shares_prefix_cache:
            salt = tenant_salt(request.tenant, salt)
        elif request.priority == priority:
            return request
        return structs.replace(request, priority=priority, cache_salt=salt)


def tenant_salt(tenant: str, cache_salt: str) -> str:
    """Return a salt for the prefix cache that differs for every pair of tenant and salt.

    Each part is preceded by its length, so that no two pairs are encoded alike.
    """
    parts = (_DOMAIN, tenant.encode(), cache_salt.encode("utf-8", "surrogatepass"))
    return sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()


WORK_FACTOR = 3
"""The length of a pause, as a multiple of the work before it."""
MAX_PAUSE_SECONDS = 0.02
"""The longest pause between two requests of one client."""


def pause_seconds(work_seconds: float, factor: float = WORK_FACTOR) -> float:
    """Return how long a client's next request waits after ``work_seconds`` of work for its last one."""
    return min(factor * work_seconds, MAX_PAUSE_SECONDS)


class Throttle:
    """Leaves three quarters of the event loop's time to others. Made before a piece of work begins."""

    def __init__(self, max_seconds: float = math.inf) -> None:
        self._max_seconds = max_seconds
        self._began = time.monotonic()

    async def after_work(self) -> None:
        """Sleep for three times as long as the work took since the last pause, for ``max_seconds`` at most."""
        await asyncio.sleep(min(WORK_FACTOR * (time.monotonic() - self._began), self._max_seconds))
        self._began = time.monotonic()


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
