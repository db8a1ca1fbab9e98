"""The state of a worker between its start and its end, the role in which it serves, and what it does next.

``next_flip_step`` and ``next_settling_step`` decide that while it changes its role, drains, or is unsettled: pure functions.
``flipping.py`` and ``settling.py`` wait for what these decisions depend on, and carry them out. The protocol's model checker
calls them too (``docs/protocol.md``).
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from msgspec.structs import replace

from contract.errors import UnavailableError
from contract.identity import Role, worker_role
from contract.membership import Credit, RoleOrder
from worker.role_rules import LegCall, ReadLeg, RoleRules, Roles


class WorkerState(StrEnum):
    """The states of a worker.

    STARTING: no router has accepted the worker yet. DRAINING: legs that are bound continue, and no new ones are. LEFT: it
    accepts nothing more, and its process ends.
    """

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    LEFT = "left"


class Lifecycle:
    """Owns the state and the role of one worker: STARTING → SERVING ⇄ DRAINING → LEFT.

    is_stopping: the worker's process is to end, so that a drain cannot be undone. num_drains: drains that were begun.
    role_epoch: that of the last change of the role; 0 while the worker has the role in which it started. next_role: the
    role that the worker is to take as soon as every router binds no leg by this one. is_unsettled: it may lend and fetch at
    once. is_reloading: its weights are replaced (``worker/reloading.py``). roles: the rules of all roles.
    """

    def __init__(self, role: Role, roles: Roles) -> None:
        self.role = role
        self.role_epoch = 0
        self.state = WorkerState.STARTING
        self.is_stopping = False
        self.num_drains = 0
        self.next_role: Role | None = None
        self.is_unsettled = False
        self.is_reloading = False
        self._former_role = role
        self._roles = roles

    @property
    def rules(self) -> RoleRules:
        """The rules of the role."""
        return self._roles[self.role]

    @property
    def is_draining(self) -> bool:
        """True from the beginning of a drain until it is undone, or the worker leaves."""
        return self.state is WorkerState.DRAINING

    def on_attach(self) -> None:
        """Record that a router has accepted the worker."""
        if self.state is WorkerState.STARTING:
            self.state = WorkerState.SERVING

    def drain(self) -> None:
        """Begin to drain. Raises UnavailableError if the worker has left."""
        self.check_open()
        self.state = WorkerState.DRAINING
        self.num_drains += 1

    def undrain(self) -> None:
        """Serve again; does nothing without a drain. Raises UnavailableError if the process is to end."""
        if self.is_stopping:
            raise UnavailableError("the worker is stopping; its drain cannot be undone")
        if self.is_draining:
            self.state = WorkerState.SERVING

    def leave(self) -> None:
        """Accept nothing more, for good."""
        self.is_stopping = True
        self.state = WorkerState.LEFT

    def set_role(self, role: Role, epoch: int) -> None:
        """Serve in this role from now on. If it is another one, the worker ends what was begun by the former one."""
        self.is_unsettled = self.is_unsettled or role is not self.role
        self._former_role = self.role
        self.role = role
        self.role_epoch = epoch
        self.next_role = None

    def credit(self, full: Credit) -> Credit:
        """Return the credit to offer: that of one role at a time (law 4), or nothing while the worker closes or drains."""
        # A drain has precedence over a change of the role, which ends then.
        if self.is_draining:
            return Credit(is_draining=True, is_unsettled=self.is_unsettled)
        if self.is_reloading:
            return Credit()
        if self.next_role:
            return Credit(next_role=self.next_role.value)
        return replace(full, is_unsettled=self.is_unsettled)

    def reader_of(self, call: LegCall) -> ReadLeg | None:
        """Return how the role reads this call; None if it does not serve it.

        What the former role served is served until the worker is settled: legs of it may be on their way.
        """
        former = self._roles[self._former_role].calls if self.is_unsettled else {}
        return self.rules.calls.get(call) or former.get(call)

    def check_open(self) -> None:
        """Raise UnavailableError if the worker accepts no leg because its process ends.

        A draining worker accepts legs: its router may have sent them before it received the credit of the drain.
        """
        if self.state is WorkerState.LEFT:
            raise UnavailableError("the worker is stopping")


class RouterAnswers(Protocol):
    """The routers' answers to credits."""

    @property
    def are_answered(self) -> bool:
        """True if every router has answered its last credit."""

    @property
    def need_role(self) -> bool:
        """True if a router needs the worker in its present role, by the last answers."""

    @property
    def num_former(self) -> int:
        """Legs and moves of the worker's former state, by the last answers."""


class FlipStep(StrEnum):
    """The next step of a change of the role.

    WAIT_SETTLED: nothing can be done before the worker is settled. CLOSE: offer a credit of nothing. WAIT_ANSWERED: nothing
    can be done before every router has answered it. TAKE: take the role. KEEP: keep the present
    role. END: there is nothing to change any more.
    """

    WAIT_SETTLED = "wait_settled"
    CLOSE = "close"
    WAIT_ANSWERED = "wait_answered"
    TAKE = "take"
    KEEP = "keep"
    END = "end"


class SettlingStep(StrEnum):
    """The next step of a worker that drains or is unsettled.

    WAIT_ANSWERED: nothing can be done before every router has answered the last credit. UNSETTLE: count as unsettled.
    STAY: the worker stays unsettled until its drain is undone. WAIT_FORMER: something is left of the former
    state; the routers and the engine report when that changes. SETTLE: count as settled. END: there is nothing to follow.
    """

    WAIT_ANSWERED = "wait_answered"
    UNSETTLE = "unsettle"
    STAY = "stay"
    WAIT_FORMER = "wait_former"
    SETTLE = "settle"
    END = "end"


def next_flip_step(
    lifecycle: Lifecycle, order: RoleOrder, num_drains: int, routers: RouterAnswers
) -> FlipStep:
    """Return the next step towards the role of the newest order.

    num_drains: the drains that had begun before the change did; one that begins later ends the change.
    """
    # A drain empties the worker anyway, and the answers to its credit are not those to the credit of this change.
    if order.epoch <= lifecycle.role_epoch or lifecycle.num_drains != num_drains:
        return FlipStep.END
    if lifecycle.is_unsettled:
        return FlipStep.WAIT_SETTLED
    role = worker_role(order.role)
    if role is lifecycle.role:  # the order's epoch is reported, so that routers see that it was carried out
        return FlipStep.TAKE
    if lifecycle.next_role is not role:
        return FlipStep.CLOSE
    if not routers.are_answered:
        return FlipStep.WAIT_ANSWERED
    return FlipStep.KEEP if routers.need_role else FlipStep.TAKE


def next_settling_step(
    lifecycle: Lifecycle, routers: RouterAnswers, has_mixed_kv: Callable[[], bool]
) -> SettlingStep:
    """Return the next step of a worker between settled and unsettled. has_mixed_kv: see RoleRules, of its role and now."""
    if not (lifecycle.is_draining or lifecycle.is_unsettled):
        return SettlingStep.END
    if not routers.are_answered:
        return SettlingStep.WAIT_ANSWERED
    if not lifecycle.is_unsettled:
        return SettlingStep.UNSETTLE
    if lifecycle.is_draining:
        return SettlingStep.STAY
    return SettlingStep.WAIT_FORMER if routers.num_former or has_mixed_kv() else SettlingStep.SETTLE
