"""The credit of one worker, and how much of it is held."""

from collections.abc import Callable

from contract.membership import Credit, Load
from router.policy import is_full
from router.running_shares import Held, Use


class CreditHold:
    """One request and its tokens, which count against a worker's credit until they are released."""

    def __init__(self, capacity: "WorkerCapacity", tenant: str, num_tokens: int) -> None:
        self._capacity = capacity
        self._tenant = tenant
        self._num_tokens = num_tokens
        self._is_released = False

    def release(self) -> None:
        """Give the credit back. Does nothing the second time."""
        if not self._is_released:
            self._is_released = True
            self._capacity.give_back(self._tenant, self._num_tokens)


class WorkerCapacity:
    """The credit and load that one worker reports, and the part of the credit that this router holds.

    held: requests and tokens, by client. on_more_room: called when the worker may have room that it did not have.
    """

    def __init__(self, on_more_room: Callable[[], None]) -> None:
        self.credit = Credit()
        self.load = Load()
        self.held = Held()
        self.num_requests = 0
        self.num_tokens = 0
        self._on_more_room = on_more_room

    @property
    def waits_for_credit(self) -> bool:
        """True while the worker serves this router, but other routers hold all of its credit."""
        return self.credit.number > 0 and self.credit.max_requests == 0

    def hold(self, tenant: str, num_tokens: int) -> CreditHold:
        """Count one request of a client until the hold is released."""
        self.num_requests += 1
        self.num_tokens += num_tokens
        self.held.add(tenant, 1, num_tokens)
        return CreditHold(self, tenant, num_tokens)

    def give_back(self, tenant: str, num_tokens: int) -> None:
        """Stop counting one request of a client. Called by its hold, once."""
        self.num_requests -= 1
        self.num_tokens -= num_tokens
        self.held.add(tenant, -1, -num_tokens)
        self._on_more_room()

    def report_load(self, load: Load) -> None:
        """Take a new load. There is more room only if the KV cache was full and is not full now."""
        was_full = is_full(self.load.kv_cache_usage)
        self.load = load
        if was_full and not is_full(load.kv_cache_usage):
            self._on_more_room()

    def grant(self, credit: Credit) -> None:
        """Take a new credit."""
        self.credit = credit
        self._on_more_room()

    def use(self) -> Use:
        """Return the limits of the worker, and who holds how much of them."""
        return Use(self.credit.max_requests, self.credit.max_tokens, self.held)
