"""Decides what a worker does next while it changes its role, drains, or is unsettled: pure functions.

``flipping.py`` and ``settling.py`` wait for what these decisions depend on, and carry them out. The protocol's model checker
calls them too (``docs/protocol.md``).
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from contract.identity import Role, worker_role
from contract.membership import RoleOrder
from worker.lifecycle import Lifecycle


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
    if order.epoch <= lifecycle.role_epoch or lifecycle.num_drains != num_drains:
        return FlipStep.END
    if lifecycle.is_unsettled:
        return FlipStep.WAIT_SETTLED
    role = worker_role(order.role)
    if role is lifecycle.role:
        return FlipStep.TAKE
    if lifecycle.next_role is not role:
        return FlipStep.CLOSE
    if not routers.are_answered:
        return FlipStep.WAIT_ANSWERED
    return FlipStep.KEEP if routers.need_role else FlipStep.TAKE


def next_settling_step(
    lifecycle: Lifecycle, routers: RouterAnswers, has_mixed_kv: Callable[[], bool]
) -> SettlingStep:
    """Return the next step of a worker between settled and unsettled. has_mixed_kv: see the function of that name."""
    if not (lifecycle.is_draining or lifecycle.is_unsettled):
        return SettlingStep.END
    if not routers.are_answered:
        return SettlingStep.WAIT_ANSWERED
    if not lifecycle.is_unsettled:
        return SettlingStep.UNSETTLE
    if lifecycle.is_draining:
        return SettlingStep.STAY
    return SettlingStep.WAIT_FORMER if routers.num_former or has_mixed_kv() else SettlingStep.SETTLE


def has_mixed_kv(role: Role, *, num_leases: int, num_fetches: int) -> bool:
    """Return True if a worker lends KV beside the fetches of its role, or fetches KV beside its leases."""
    return (num_fetches if role is Role.PREFILL else num_leases) > 0
