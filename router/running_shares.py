"""A bound on the share of the workers that one client holds while other clients use the service.

A client that is alone may fill every worker. Without a bound, another client would then wait until answers of the first one
end, however fair the queue is. While other clients are active, a client that holds its share waits.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from router.recent_clients import RecentClients

RECENT_SECONDS = 10.0
"""The time after its last request in which a client counts as active."""


@dataclass
class Held:
    """Requests and tokens that run on workers, by client."""

    num_requests: Counter[str] = field(default_factory=Counter)
    num_tokens: Counter[str] = field(default_factory=Counter)

    def add(self, tenant: str, num_requests: int, num_tokens: int) -> None:
        """Count requests that begin, or with negative numbers requests that end."""
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


class RunningShares:
    """Decides if a client may begin more requests. max_share: of all requests, and of all tokens, that run at a time."""

    def __init__(self, max_share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_share = max_share
        self._recent = RecentClients(RECENT_SECONDS, clock)

    def note(self, tenant: str) -> None:
        """Record a request of a client."""
        self._recent.note(tenant)

    def may_begin(self, tenant: str, num_requests: int, num_tokens: int, use: TotalCredit) -> bool:
        """Return True if a client may begin requests of ``num_tokens`` together beside those that it holds.

        That is always true if it holds none, or if it is alone.
        """
        held_requests = use.held.num_requests.get(tenant, 0)
        if not held_requests or self.is_alone(tenant, use.held):
            return True
        held_tokens = use.held.num_tokens[tenant]
        return (
            held_requests + num_requests <= self._max_share * use.max_requests
            and held_tokens + num_tokens <= self._max_share * use.max_tokens
        )

    def is_alone(self, tenant: str, held: Held) -> bool:
        """Return True if no other client has sent a request lately, or holds one."""
        return self._recent.names <= {tenant} and held.num_requests.keys() <= {tenant}
