"""How much of what runs one client may hold while others use the service too.

A client that is alone may fill every worker. Without a bound each other client would wait until answers of the first one
end, however fair the queue is. While others are there, a client that holds its share waits.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from router.recent_clients import RecentClients

RECENT_SECONDS = 10.0
"""For how long a client that asks for nothing more counts as one that uses the service."""


@dataclass
class Held:
    """Requests and tokens that run, by client."""

    num_requests: Counter[str] = field(default_factory=Counter)
    num_tokens: Counter[str] = field(default_factory=Counter)

    def add(self, tenant: str, num_requests: int, num_tokens: int) -> None:
        """Count what begins, or with negative numbers what ends."""
        self.num_requests[tenant] += num_requests
        self.num_tokens[tenant] += num_tokens
        if not self.num_requests[tenant]:
            del self.num_requests[tenant], self.num_tokens[tenant]


@dataclass(frozen=True)
class Use:
    """What one worker takes on at most, and what it has taken on."""

    max_requests: int
    max_tokens: int
    held: Held


class RunningShares:
    """Decides whether a client may begin more. max_share: of all requests, and of all tokens, that run at the same time."""

    def __init__(self, max_share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_share = max_share
        self._recent = RecentClients(RECENT_SECONDS, clock)

    def note(self, tenant: str) -> None:
        """Record that a client asks for something now."""
        self._recent.note(tenant)

    def may_begin(self, tenant: str, num_requests: int, num_tokens: int, uses: Sequence[Use]) -> bool:
        """Return whether a client may begin requests of ``num_tokens`` together beside what it holds.

        Always where it holds nothing, or while it alone uses the service.
        """
        held_requests = sum(use.held.num_requests[tenant] for use in uses)
        if not held_requests or self.is_alone(tenant, uses):
            return True
        held_tokens = sum(use.held.num_tokens[tenant] for use in uses)
        return held_requests + num_requests <= self._max_share * sum(
            use.max_requests for use in uses
        ) and held_tokens + num_tokens <= self._max_share * sum(use.max_tokens for use in uses)

    def is_alone(self, tenant: str, uses: Sequence[Use]) -> bool:
        """Return whether no other client has asked for anything lately, or holds anything."""
        others = self._recent.names | {name for use in uses for name in use.held.num_requests}
        return others <= {tenant}
