"""The change of a worker's role while it serves: its process, its weights, its cache and its connections stay.

1. ``begin``: the worker sends its routers a credit of nothing, and waits until each of them has answered it. That takes one
   message in each direction. No leg is bound by the former role after that.
   A router that needs the present role answers that, and the worker keeps it (``router/routing/policy.py``).
2. It takes the role and reports it with the credit of the role. Routers bind legs by it at once. Legs of the former role
   continue, also one that arrives now; the router moves answers away from a worker that decodes no more.
3. Until nothing is left of the former role the worker is unsettled (``worker/settling.py``), and takes no further role.
"""

import asyncio
import logging
from collections.abc import Callable

from contract.errors import UnavailableError
from contract.identity import worker_role
from contract.membership import RoleOrder
from worker.lifecycle import FlipStep, Lifecycle, next_flip_step
from worker.settling import RouterLinks, Settling

logger = logging.getLogger(__name__)


class Flip:
    """Changes the role of one worker. settling: follows whether the worker is settled.

    A drain ends a change that was not made.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        settling: Settling,
        routers: Callable[[], RouterLinks],
    ) -> None:
        self._lifecycle = lifecycle
        self.settling = settling
        self._routers = routers
        self._order: RoleOrder | None = None
        self._change: asyncio.Task[None] | None = None

    def begin(self, order: RoleOrder) -> None:
        """Take another role as soon as possible. Ignores an order that is older than another one.

        Raises InvalidRequestError for a role that no worker has, UnavailableError if the worker drains or ends.
        """
        worker_role(order.role)
        lifecycle = self._lifecycle
        if lifecycle.is_stopping or lifecycle.is_draining or lifecycle.is_reloading:
            raise UnavailableError("the worker drains, is reloaded or is stopping; it takes no other role")
        # Several routers may pass on orders of several operators: the newest one counts, in whatever sequence they come.
        newest = self._order.epoch if self._order else self._lifecycle.role_epoch
        if order.epoch <= newest:
            return
        self._order = order
        if self._change is None:
            self._change = asyncio.create_task(self._carry_out(), name="change the role")

    def close(self) -> None:
        """End a change that was not made yet, since the worker leaves. Does nothing the second time."""
        self.settling.close()
        if self._change:
            self._change.cancel()
            self._change = None
        self._order = None
        self._lifecycle.next_role = None

    async def _carry_out(self) -> None:
        """Carry out the newest order, and those that come meanwhile."""
        num_drains = self._lifecycle.num_drains
        while self._order is not None:
            step = next_flip_step(self._lifecycle, self._order, num_drains, self.settling.answers)
            match step:
                case FlipStep.END:
                    break
                case FlipStep.WAIT_SETTLED:
                    await self.settling.settled.wait()
                case FlipStep.WAIT_ANSWERED:
                    await self.settling.wait_answered()
                case FlipStep.CLOSE:
                    self._lifecycle.next_role = worker_role(self._order.role)
                    # Of nothing, so that no router binds a leg of a role that is about to end.
                    self._routers().send_credit()
                case FlipStep.TAKE | FlipStep.KEEP:
                    self._change_role(is_kept=step is FlipStep.KEEP)
        if self._lifecycle.num_drains != num_drains:
            logger.info("a drain has ended the change of the role")
        self._order = None
        self._change = None
        # The role was not taken: offer again what was withdrawn for it.
        if self._lifecycle.next_role:
            self._lifecycle.next_role = None
            self._routers().send_credit()

    def _change_role(self, *, is_kept: bool) -> None:
        """Take the role now: every router has answered that it binds no leg by the former one.

        is_kept: keep the present role, because a router needs it. That is reported like a role that was taken.
        """
        assert self._order is not None, "the change is under way"
        if is_kept:
            logger.warning("the order to become a %s worker is refused by a router", self._order.role)
        role = self._lifecycle.role if is_kept else worker_role(self._order.role)
        self._lifecycle.set_role(role, self._order.epoch)
        self.settling.watch()
        # The role before the credit: a router reads the credit as that of the role it has.
        self._routers().send_role()
        self._routers().send_credit()
        logger.info("this is a %s worker now", role.value)
