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
            self._end()

    async def _carry_out(self) -> None:
        """Carry out the newest order, and those that come meanwhile."""
        lifecycle = self._lifecycle
        num_drains = lifecycle.num_drains
        while (order := self._order) and order.epoch > lifecycle.role_epoch:
            await self._settling.wait_settled()
            if worker_role(order.role) is not lifecycle.role:
                lifecycle.is_closing = True
                self._announce_credit()
                await self._settling.wait_answered()
            if lifecycle.num_drains != num_drains:
                logger.info("a drain has ended the change of the role")
                break
            self._take(self._order)
        self._end()

    def _take(self, order: RoleOrder) -> None:
        """Take the role now. Every router has answered that it binds no leg by the former one."""
        role = worker_role(order.role)
        if role is not self._lifecycle.role:
            self._settling.begin()
        self._lifecycle.take_role(role, order.epoch)
        self._announce_role()
        self._announce_credit()
        logger.info("this is a %s worker now", role.value)

    def _end(self) -> None:
        self._order = None
        self._change = None
        self._lifecycle.is_closing = False
