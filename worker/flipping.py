"""The change of a worker's role while it serves: its process, its weights, its cache and its connections stay.

1. ``begin``: the worker sends its routers a credit of nothing, and waits until each of them has answered it. That takes one
   message in each direction. No leg is bound by the former role after that.
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
from worker.lifecycle import Lifecycle
from worker.settling import Settling
from worker.transitions import FlipStep, next_flip_step

logger = logging.getLogger(__name__)


class Flip:
    """Changes the role of one worker.

    announce_credit, announce_role: send the credit, or the role, to all routers. A drain ends a change that was not made.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        settling: Settling,
        announce_credit: Callable[[], None],
        announce_role: Callable[[], None],
    ) -> None:
        self._lifecycle = lifecycle
        self._settling = settling
        self._announce_credit = announce_credit
        self._announce_role = announce_role
        self._order: RoleOrder | None = None
        self._change: asyncio.Task[None] | None = None

    def begin(self, order: RoleOrder) -> None:
        """Take another role as soon as possible. Ignores an order that is older than another one.

        Raises InvalidRequestError for a role that no worker has, UnavailableError if the worker drains or ends.
        """
        worker_role(order.role)
        if self._lifecycle.is_stopping or self._lifecycle.is_draining:
            raise UnavailableError("the worker drains or is stopping; it takes no other role")
        newest = self._order.epoch if self._order else self._lifecycle.role_epoch
        if order.epoch <= newest:
            return
        self._order = order
        if self._change is None:
            self._change = asyncio.create_task(self._carry_out(), name="change the role")

    def close(self) -> None:
        """End a change that was not made yet, since the worker leaves. Does nothing the second time."""
        self._settling.close()
        if self._change:
            self._change.cancel()
            self._change = None
        self._order = None
        self._lifecycle.is_closing = False

    async def _carry_out(self) -> None:
        """Carry out the newest order, and those that come meanwhile."""
        num_drains = self._lifecycle.num_drains
        while (step := self._next_step(num_drains)) is not FlipStep.END:
            match step:
                case FlipStep.WAIT_SETTLED:
                    await self._settling.wait_settled()
                case FlipStep.WAIT_ANSWERED:
                    await self._settling.wait_answered()
                case FlipStep.CLOSE:
                    self._lifecycle.is_closing = True
                    self._announce_credit()
                case FlipStep.TAKE:
                    self._take()
        if self._lifecycle.num_drains != num_drains:
            logger.info("a drain has ended the change of the role")
        self._end()

    def _next_step(self, num_drains: int) -> FlipStep:
        if self._order is None:
            return FlipStep.END
        return next_flip_step(self._lifecycle, self._order, num_drains, self._settling.answers)

    def _take(self) -> None:
        """Take the role now. Every router has answered that it binds no leg by the former one."""
        assert self._order is not None, "the change is under way"
        role = worker_role(self._order.role)
        self._lifecycle.take_role(role, self._order.epoch)
        self._settling.watch()
        self._announce_role()
        self._announce_credit()
        logger.info("this is a %s worker now", role.value)

    def _end(self) -> None:
        """End the change; a worker that offers nothing because of it offers its credit again."""
        self._order = None
        self._change = None
        if self._lifecycle.is_closing:
            self._lifecycle.is_closing = False
            self._announce_credit()
