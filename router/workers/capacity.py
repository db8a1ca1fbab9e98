"""The credit of one worker, how much of it is held, and what is left of the worker's former roles."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from contract.membership import Credit, CreditUse, Load, RoleOrder
from router.routing.running_shares import Held
from router.routing.views import is_full


class CreditHold:
    """One request and its tokens, which count against a worker's credit until they are released."""

    def __init__(self, capacity: "WorkerCapacity", held: Held | None, tenant: str, num_tokens: int) -> None:
        self._capacity = capacity
        self._num_roles = capacity.num_roles
        # those of the moment: the worker may take a role in the meantime, whose legs are counted elsewhere
        self._held = held
        self._tenant = tenant
        self._num_tokens = num_tokens
        self._is_released = False

    def release(self) -> None:
        """Give the credit back. Does nothing the second time."""
        if not self._is_released:
            self._is_released = True
            if self._held is not None:
                self._held.add(self._tenant, -1, -self._num_tokens)
            capacity = self._capacity
            # a leg of a former role holds nothing of the credit that the present one has
            if self._num_roles == capacity.num_roles:
                capacity.num_requests -= 1
                capacity.num_tokens -= self._num_tokens
            else:
                capacity.former.num_legs -= 1
                capacity.former.check()
            capacity.on_change(True)


class WorkerCapacity:
    """The credit and load that one worker reports, and the part of the credit that this router holds.

    held: counts what clients hold of all workers among which their shares are divided; None if this is none of them.
    on_change: called at every change of these, with True if the worker may have room that it did not have. num_roles: roles
    that the worker has had. num_requests, num_tokens: held for legs of its present role. former: legs of former ones, and
    moves. on_nothing_left: called when there are none of these any more.
    ordered: the last order of this router to take a role, until the worker offers the role or has kept its own. needs_role:
    this router has answered the worker's credit that it must keep its role.
    """

    def __init__(
        self, held: Held | None, on_change: Callable[[bool], None], on_nothing_left: Callable[[], None]
    ) -> None:
        self.credit = Credit()
        self.load = Load()
        self.held = held
        self.num_requests = 0
        self.num_tokens = 0
        self.former = FormerWork(on_nothing_left)
        self.num_roles = 1
        self.ordered: RoleOrder | None = None
        self.needs_role = False
        self.on_change = on_change

    @property
    def waits_for_credit(self) -> bool:
        """True while the worker serves this router, but other routers hold all of its credit."""
        credit = self.credit
        return credit.number > 0 and credit.max_requests == 0 and not credit.is_draining

    @property
    def changes_role(self) -> bool:
        """True while the worker may take another role, and this router has not answered that it must not."""
        return bool(self.credit.next_role) and not self.needs_role

    def hold(self, tenant: str, num_tokens: int) -> CreditHold:
        """Count one request of a client until the hold is released."""
        self.num_requests += 1
        self.num_tokens += num_tokens
        if self.held is not None:
            self.held.add(tenant, 1, num_tokens)
        self.on_change(False)
        return CreditHold(self, self.held, tenant, num_tokens)

    def set_role(self, held: Held | None) -> None:
        """Count legs of a new role, which has no credit until the worker sends it. held: see above."""
        # they run to their end, and the worker gets a report when the last one is over
        self.former.num_legs += self.num_requests
        self.num_requests = 0
        self.num_tokens = 0
        self.num_roles += 1
        self.held = held
        self.grant(Credit(number=self.credit.number, is_unsettled=True))

    def use(self) -> CreditUse:
        """Return the answer to the last credit."""
        return CreditUse(
            number=self.credit.number,
            num_requests=self.num_requests,
            num_tokens=self.num_tokens,
            num_former=self.former.num_left,
            needs_role=self.needs_role,
        )

    def report_load(self, load: Load) -> None:
        """Take a new load. There is more room only if the KV cache was full and is not full now."""
        was_full = is_full(self.load.kv_cache_usage)
        self.load = load
        self.on_change(was_full and not is_full(load.kv_cache_usage))

    def grant(self, credit: Credit) -> None:
        """Take a new credit."""
        self.credit = credit
        self.on_change(True)


class FormerWork:
    """Counts legs of a worker's former roles, and moves of answers away from it.

    on_nothing_left: called when there are none any more.
    """

    def __init__(self, on_nothing_left: Callable[[], None]) -> None:
        self.num_legs = 0
        self.num_moves = 0
        self._on_nothing_left = on_nothing_left

    @property
    def num_left(self) -> int:
        """The number of legs and moves together."""
        return self.num_legs + self.num_moves

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Count a move, or several that follow each other, until the block ends."""
        self.num_moves += 1
        try:
            yield
        finally:
            self.num_moves -= 1
            self.check()

    def check(self) -> None:
        """Call ``on_nothing_left`` if there is neither a leg nor a move. Call it when one of them has ended."""
        if not self.num_left:
            self._on_nothing_left()
