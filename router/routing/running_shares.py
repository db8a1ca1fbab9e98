"""A bound on the share of the workers that one client holds while other clients use the service.

A client that is alone may use nearly all of the workers. Without a bound, another client would then wait until answers of
the first one end, however fair the queue is. While other clients are active, a client that holds its share waits, and room
for one short request stays free at all times for clients that hold none. A prompt with more choices than a client may begin
begins with those that it may, and the others follow one after another.
"""

import time
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, field

import msgspec


class RecentClients:
    """Owns the time of each client's last request, oldest first. seconds: how long a client counts as recent after it."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._noted_at: dict[str, float] = {}

    def note(self, client: str) -> None:
        """Record a request of a client."""
        # taken out first, so that the client moves to the end of the order
        self._noted_at.pop(client, None)
        self._noted_at[client] = self._clock()

    @property
    def names(self) -> Set[str]:
        """The clients that count as recent now."""
        # the oldest are first, so this ends at the first one that is recent
        since = self._clock() - self._seconds
        while self._noted_at and self._noted_at[oldest := next(iter(self._noted_at))] <= since:
            del self._noted_at[oldest]
        return self._noted_at.keys()


RECENT_SECONDS = 10.0
"""The time after its last request in which a client counts as active."""
_RESERVED = 1 / 16
"""The share of a worker's tokens that is kept free; more than the 5 % from which on a KV pool counts as full."""
_MIN_REQUESTS = 8
"""Requests that the workers take at once from which on one of them is kept free."""


@dataclass
class Held:
    """Requests and tokens that run on workers, by client."""

    num_requests: Counter[str] = field(default_factory=Counter)
    num_tokens: Counter[str] = field(default_factory=Counter)
    all_requests: int = 0
    all_tokens: int = 0

    def add(self, tenant: str, num_requests: int, num_tokens: int) -> None:
        """Count requests that begin, or with negative numbers requests that end."""
        self.all_requests += num_requests
        self.all_tokens += num_tokens
        # not ``+=`` and ``del``, which a Counter implements in Python
        total = self.num_requests.get(tenant, 0) + num_requests
        if total:
            self.num_requests[tenant] = total
            self.num_tokens[tenant] = self.num_tokens.get(tenant, 0) + num_tokens
        else:
            self.num_requests.pop(tenant, None)
            self.num_tokens.pop(tenant, None)


class TotalCredit(msgspec.Struct, frozen=True):
    """The credit of several workers together, and what is held of it."""

    num_workers: int
    max_requests: int
    max_tokens: int
    held: Held

    @property
    def short_tokens(self) -> int:
        """Tokens up to which a request counts as short; so many stay free for clients that hold nothing."""
        return int(_RESERVED * self.max_tokens / max(1, self.num_workers))


class RunningShares:
    """Decides if a client may begin more requests. max_share: of all requests, and of all tokens, that run at a time."""

    def __init__(self, max_share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_share = max_share
        self._recent = RecentClients(RECENT_SECONDS, clock)

    def note(self, tenant: str) -> None:
        """Record a request of a client."""
        self._recent.note(tenant)

    def num_to_begin(
        self, tenant: str, num_choices: int, num_prompt_tokens: int, num_answer_tokens: int, use: TotalCredit
    ) -> int:
        """Return with how many of its choices a client's request may begin beside those that it holds; 0: it must wait.

        num_prompt_tokens, num_answer_tokens: of the prompt, and of each choice. A client that holds none may begin one,
        and so may one that is alone if it is so large that no room could stay free beside it. Without API keys ("") there
        is one client, for which nothing is bounded.
        """
        if not tenant:
            return num_choices
        is_alone = self.is_alone(tenant, use.held)
        share = 1.0 if is_alone else self._max_share
        own_requests = share * use.max_requests - use.held.num_requests.get(tenant, 0)
        num_reserved = int(use.max_requests >= _MIN_REQUESTS)
        free_requests = min(own_requests, use.max_requests - num_reserved - use.held.all_requests)
        own_tokens = share * use.max_tokens - use.held.num_tokens.get(tenant, 0)
        free_tokens = min(own_tokens, use.max_tokens - use.short_tokens - use.held.all_tokens)
        free_answers = (free_tokens - num_prompt_tokens) / max(1, num_answer_tokens)
        number = min(num_choices, int(free_requests), int(free_answers))
        if number > 0:
            return number
        # beside such a request no room can stay free on a worker, so to wait for that would never end
        large = num_prompt_tokens + num_answer_tokens > use.max_tokens / max(1, use.num_workers) / 2
        holds_none = tenant not in use.held.num_requests
        return int(holds_none or (is_alone and num_choices == 1 and large and free_requests >= 1))

    def may_overdraw(self, tenant: str, num_choices: int, num_tokens: int, use: TotalCredit) -> bool:
        """Return True for a short request of a client that holds none: it fits even where all tokens are promised."""
        is_short = num_choices == 1 and num_tokens <= use.short_tokens
        return bool(tenant) and is_short and tenant not in use.held.num_requests

    def is_alone(self, tenant: str, held: Held) -> bool:
        """Return True if no other client has sent a request lately, or holds one."""
        return self._recent.names <= {tenant} and held.num_requests.keys() <= {tenant}
