"""Limits on one client: the parts of its requests, their bytes, priority, time on the event loop, and whose KV it uses."""

import asyncio
import math
import time
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from hashlib import sha256

from msgspec import structs

from contract.errors import InvalidRequestError, OverloadedError
from contract.sampling import LISTS
from router.intake.prepared_request import PreparedRequest
from router.intake.request import BACKGROUND_PRIORITY, EmbeddingRequest, GenerationRequest
from text.chat import Chat

_DOMAIN = b"kvbaton.cache_salt.v1"
WORK_FACTOR = 3
"""The length of a pause, as a multiple of the work before it."""
MAX_PAUSE_SECONDS = 0.02
"""The longest pause between two requests of one client."""
MAX_MESSAGES = 4096
MAX_PROMPTS = 2048
MAX_PROMPT_TOKENS = 2**20
"""Tokens of all prompts of one request together. A single prompt may have what fits the model in any case."""
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_ALL_STOP_CHARACTERS = 4096
MAX_REPEATED_BYTES = 2**25
"""Bytes of what is sent again with each prompt of one request, all prompts together."""
MAX_CACHE_SALT_CHARACTERS = 1024
"""The salt is sent to workers with every prompt of a request."""


def check_limits(request: GenerationRequest | EmbeddingRequest) -> None:
    """Raise InvalidRequestError that names the first field that is too large."""
    if isinstance(request, GenerationRequest):
        if isinstance(request.prompt, Chat):
            _at_most(MAX_MESSAGES, request.prompt.messages, "messages", "messages")
        if stops := request.stop:
            _at_most(MAX_STOPS, stops, "stop", "strings")
            longest = max(map(len, stops))
            if longest > MAX_STOP_CHARACTERS:
                raise InvalidRequestError(
                    f"stop holds a string of {longest} characters; the limit is {MAX_STOP_CHARACTERS}",
                    param="stop",
                )
            if (together := sum(map(len, stops))) > MAX_ALL_STOP_CHARACTERS:
                raise InvalidRequestError(
                    f"the strings of stop have {together} characters together; "
                    f"the limit is {MAX_ALL_STOP_CHARACTERS}",
                    param="stop",
                )
        for parameter in LISTS:
            if held := getattr(request, parameter.name):
                things = "entries" if parameter.kind == "biases" else "token ids"
                _at_most(parameter.max_items or 0, held, parameter.name, things)
    _at_most(MAX_CACHE_SALT_CHARACTERS, request.cache_salt, "cache_salt", "characters")


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
        # the salt of two keys differs even if they send the same one, so a hit in the cache reveals nothing of another
        # key
        if request.tenant and not self.shares_prefix_cache:
            salt = tenant_salt(request.tenant, salt)
        elif request.priority == priority:
            return request
        return structs.replace(request, priority=priority, cache_salt=salt)


def tenant_salt(tenant: str, cache_salt: str) -> str:
    """Return a salt for the prefix cache that differs for every pair of tenant and salt.

    Each part is preceded by its length, so that no two pairs are encoded alike.
    """
    # a salt may hold half of a surrogate pair, which is no reason to fail here
    parts = (_DOMAIN, tenant.encode(), cache_salt.encode("utf-8", "surrogatepass"))
    return sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()


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


class ClientCounts:
    """Counts what a router holds for each client. All reads take the same time, however many clients there are."""

    def __init__(self) -> None:
        self.total = 0
        self._by_client: dict[str, int] = {}

    def of(self, client: str) -> int:
        """Return the count of a client."""
        return self._by_client.get(client, 0)

    def add(self, client: str, difference: int) -> None:
        """Add to the count of a client, or take away with a negative number."""
        # a client that holds nothing is forgotten: its key may never come back
        self.total += difference
        if number := self._by_client.get(client, 0) + difference:
            self._by_client[client] = number
        else:
            self._by_client.pop(client, None)

    def has_room(self, client: str, limit: int, num_more: int = 1) -> bool:
        """Return True if ``num_more`` may be added for a client, as if they came one after the other.

        When ``limit`` is reached in total, a client that holds less than its share (``limit`` divided by the clients that
        hold any) is still admitted: another one holds more than its own. Therefore at most ``2 * limit`` are held, and no
        client is kept out by the others.
        """
        if self.total + num_more <= limit:
            return True
        # the one that asks counts too: it would be one more client with a share
        num_clients = len(self._by_client) + (client not in self._by_client)
        return num_clients > 1 and self.of(client) + num_more <= limit // num_clients


class HeldBytes:
    """Owns the count of the bytes of all requests that the router holds, by client; ``ClientCounts`` admits them.

    The bound on the queue counts requests, and one request may have a thousand times the bytes of another.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._counts = ClientCounts()

    @property
    def num_bytes(self) -> int:
        """The bytes of all requests."""
        return self._counts.total

    def holding(self, tenant: str, num_bytes: int) -> "Holding":
        """Return a block in which a request's bytes are counted. To enter it raises OverloadedError if there is no room."""
        return Holding(self, tenant, num_bytes)

    def add(self, tenant: str, num_bytes: int) -> None:
        """Count bytes of a request. Raises OverloadedError if there is no room for them."""
        if not self._counts.has_room(tenant, self._max_bytes, num_bytes):
            raise OverloadedError(
                f"the requests that wait or are answered have {self.num_bytes} bytes together, and the limit is "
                f"{self._max_bytes} (max_held_bytes); send this one again later"
            )
        self._counts.add(tenant, num_bytes)

    def remove(self, tenant: str, num_bytes: int) -> None:
        """Stop counting bytes of a request."""
        self._counts.add(tenant, -num_bytes)


class Holding:
    """A block in which the bytes of one request are counted."""

    def __init__(self, held: HeldBytes, tenant: str, num_bytes: int) -> None:
        self._held = held
        self._tenant = tenant
        self._num_bytes = num_bytes

    def __enter__(self) -> None:
        self._held.add(self._tenant, self._num_bytes)

    def __exit__(self, *_: object) -> None:
        self._held.remove(self._tenant, self._num_bytes)
