"""The change of a worker's role while its process, its weights and its connections stay.

1. ``begin``: the worker drains, so its router moves its answers to other workers (``worker/draining.py``).
2. When it is empty and no leg is bound to it, it takes the role, reports that to its routers, and serves again.

A worker never lends in one role while it fetches in another one: two workers that wait for each other's blocks would be a
deadlock (law 4). A drain that is undone, and a stop, end a change that was begun.
"""

import logging
from collections.abc import Callable

from contract.errors import UnavailableError
from contract.identity import Role, worker_role
from contract.membership import RoleOrder
from worker.draining import Drain
from worker.emptiness import Emptiness
from worker.lifecycle import Lifecycle

logger = logging.getLogger(__name__)


class Flip:
    """Changes the role of one worker. announce: sends the role to all routers."""

    def __init__(
        self, lifecycle: Lifecycle, drain: Drain, emptiness: Emptiness, announce: Callable[[], None]
    ) -> None:
        self._lifecycle = lifecycle
        self._drain = drain
        self._emptiness = emptiness
        self._announce = announce

    def begin(self, order: RoleOrder) -> None:
        """Take another role as soon as possible. Ignores an order that is older than the last change.

        Raises InvalidRequestError for a role that no worker has, UnavailableError if the process is to end.
        """
        role = worker_role(order.role)
        if self._lifecycle.is_stopping:
            raise UnavailableError("the worker is stopping; it takes no other role")
        if order.epoch <= self._lifecycle.role_epoch:
            return
        if role is self._lifecycle.role:
            self._lifecycle.take_role(role, order.epoch)
            self._announce()
            return
        logger.info("becoming a %s worker", role.value)
        self._drain.begin()
        self._emptiness.when_unbound(lambda: self._take(role, order.epoch))

    def _take(self, role: Role, epoch: int) -> None:
        if self._lifecycle.is_stopping:
            return
        self._lifecycle.take_role(role, epoch)
        self._announce()
        self._drain.undo()
        logger.info("this is a %s worker now", role.value)
