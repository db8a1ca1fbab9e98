"""Orders to workers that the death of a worker's process does not undo.

A worker that was flipped, or drained by an operator, and is lost without a goodbye is started again by its supervisor with
the role of its command, and serves. When it attaches again under its id, the router gives it the role again and drains it
again. A worker that has sent its goodbye was stopped on purpose: its next process begins anew, and the router logs what that
undoes. Roles are known to every router, drains to the router that has ordered them.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from contract.identity import Role
from contract.membership import DrainOrder, RoleOrder
from router.workers.attached_worker import AttachedWorker

logger = logging.getLogger(__name__)

OPERATOR = "operator"
_MAX_NAMES = 8192
"""The ids of workers that are remembered. Kubernetes gives every pod a name of its own."""


@dataclass(frozen=True)
class _Former:
    """The former process of a worker. is_cordoned: an operator has drained it. has_left: it was stopped on purpose.

    is_ordered: its successor was ordered to take its role.
    """

    boot_id: str
    role: Role
    is_cordoned: bool
    has_left: bool
    is_ordered: bool = False


class StandingOrders:
    """Owns what was ordered of the workers of one router, by their ids."""

    def __init__(self) -> None:
        self._drained_by: dict[str, str] = {}
        self._former: OrderedDict[str, _Former] = OrderedDict()

    def on_drain(self, worker: AttachedWorker, by: str) -> None:
        """Record who drains a worker."""
        self._drained_by[worker.name] = by

    def on_undrain(self, worker: AttachedWorker) -> None:
        """Record that a worker is to serve again."""
        self._drained_by.pop(worker.name, None)

    def drained_by(self, worker: AttachedWorker) -> str | None:
        """Return who drains a worker; None if it does not drain, or that was not ordered here."""
        return self._drained_by.get(worker.name) if worker.capacity.credit.is_draining else None

    def on_detach(self, worker: AttachedWorker) -> None:
        """Remember a worker whose stream has ended."""
        by = self._drained_by.get(worker.name)
        self._former[worker.name] = _Former(
            worker.registration.boot_id, worker.role, by == OPERATOR, worker.is_leaving
        )
        self._former.move_to_end(worker.name)
        if len(self._former) > _MAX_NAMES:
            self._drained_by.pop(self._former.popitem(last=False)[0], None)

    def restore(
        self, worker: AttachedWorker, missing_with: Callable[[AttachedWorker, Role], frozenset[Role]]
    ) -> None:
        """Give a worker that serves what its former process was ordered. missing_with: see ``Registry.missing_with``."""
        former = self._former.get(worker.name)
        if former is None or not worker.capacity.credit.max_requests:
            return
        if former.boot_id == worker.registration.boot_id:  # it was only cut off, and has done all that itself
            del self._former[worker.name]
            return
        if former.has_left:
            self._forget(worker, former)
            return
        if former.role is not worker.role and not self._restore_role(worker, former, missing_with):
            return
        del self._former[worker.name]
        if former.is_cordoned:
            logger.warning(
                "worker %s was drained by an operator before it was lost: it drains again", worker.name
            )
            worker.drain(DrainOrder())
        else:
            self._drained_by.pop(worker.name, None)

    def _restore_role(
        self,
        worker: AttachedWorker,
        former: _Former,
        missing_with: Callable[[AttachedWorker, Role], frozenset[Role]],
    ) -> bool:
        """Order a worker to take its former role. Returns True when that is over: it cannot, or has kept its own."""
        if worker.capacity.ordered:
            return False
        if former.is_ordered or missing_with(worker, former.role):
            logger.warning(
                "worker %s was %s before it was lost, and is needed as %s: the change of its role is undone",
                worker.name,
                former.role.value,
                worker.role.value,
            )
            return True
        logger.warning(
            "worker %s was %s before it was lost: it takes that role again", worker.name, former.role.value
        )
        self._former[worker.name] = replace(former, is_ordered=True)
        worker.flip(RoleOrder(role=former.role.value, epoch=time.time_ns() // 1000))
        return False

    def _forget(self, worker: AttachedWorker, former: _Former) -> None:
        """Log what the start of another process undoes."""
        del self._former[worker.name]
        self._drained_by.pop(worker.name, None)
        if former.role is not worker.role:
            logger.warning(
                "worker %s was stopped as %s and starts as %s: the change of its role is undone",
                worker.name,
                former.role.value,
                worker.role.value,
            )
        if former.is_cordoned:
            logger.warning(
                "worker %s was stopped while an operator drained it, and serves again: that drain is undone",
                worker.name,
            )
