"""The admin API about workers: ``GET /admin/workers``, and ``POST /admin/workers/ID/drain``, ``/undrain``, ``/flip``."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from aiohttp import web

from contract.errors import InvalidRequestError, NotFoundError, UnavailableError
from contract.identity import Role, worker_role
from contract.membership import DrainOrder, RoleOrder
from contract.scaling import AUTOSCALER
from router.admin.admin_access import answering
from router.migration.standing_orders import OPERATOR, StandingOrders
from router.request_path import RequestPath
from router.workers.attached_worker import AttachedWorker
from router.workers.registry import Registry
from router.workers.worker_facts import worker_facts
from serving.admin import json_answer
from serving.admin_access import AdminAccess
from serving.query import seconds_in

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 5.0
"""The time in which a worker answers an order with its credit."""


class WorkerAdmin:
    """Serves the API on a router's admin port, which checks the access.

    access: names operators in the log. standing: keeps what operators have ordered. facts: returns the answer to the list.
    """

    def __init__(
        self,
        path: RequestPath,
        access: AdminAccess,
        standing: StandingOrders,
        facts: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._standing = standing
        self._path = path
        self._access = access
        self._facts = facts

    def routes(self) -> list[web.RouteDef]:
        """Return all paths."""
        return [
            web.get("/admin/workers", answering(self._list)),
            web.post("/admin/workers/{id}/drain", answering(self._drain)),
            web.post("/admin/workers/{id}/undrain", answering(self._undrain)),
            web.post("/admin/workers/{id}/flip", answering(self._flip)),
        ]

    async def _list(self, _: web.Request) -> web.Response:
        return json_answer(self._facts())

    async def _drain(self, request: web.Request) -> web.Response:
        """Send the order to drain: 200 once the worker is empty or gone, 202 if it is not within ``wait`` seconds."""
        worker = self._worker_of(request)
        deadline = seconds_in(request, "deadline")
        wait = seconds_in(request, "wait") or 0.0
        logger.info("worker %s is drained by %s", worker.name, self._access.requester(request))
        self._standing.drained(worker, AUTOSCALER if request.query.get("by") == AUTOSCALER else OPERATOR)
        worker.drain(DrainOrder(deadline_seconds=deadline))
        capacity = worker.capacity
        await self._until_answered(worker, lambda: capacity.credit.is_draining)
        is_empty = await self._within(wait, lambda: worker.is_empty or worker.gone.is_set())
        return json_answer(worker_facts(worker), status=200 if is_empty else 202)

    async def _undrain(self, request: web.Request) -> web.Response:
        """Send the order to serve again: 200 once the worker does. Raises UnavailableError if it is stopping."""
        worker = self._worker_of(request)
        logger.info("the drain of worker %s is cancelled by %s", worker.name, self._access.requester(request))
        self._standing.undrained(worker)
        worker.undrain()
        await self._until_answered(worker, lambda: not worker.capacity.credit.is_draining)
        return json_answer(worker_facts(worker))

    async def _flip(self, request: web.Request) -> web.Response:
        """Send the order to take a role: 200 once the worker has it, 202 if it has not within ``wait`` seconds.

        Raises UnavailableError if the worker has kept its role.
        """
        worker = self._worker_of(request)
        role = worker_role(request.query.get("role", ""))
        wait = seconds_in(request, "wait") or 0.0
        _check_flip(self._path.registry, worker, role)
        logger.info(
            "worker %s is made a %s worker by %s", worker.name, role.value, self._access.requester(request)
        )
        worker.flip(RoleOrder(role=role.value, epoch=time.time_ns() // 1000))
        capacity = worker.capacity

        def is_done() -> bool:
            is_over = not capacity.ordered and (worker.role is not role or capacity.credit.max_requests > 0)
            return worker.gone.is_set() or is_over

        is_taken = await self._within(wait, is_done)
        if is_taken and worker.role is not role and not worker.gone.is_set():
            raise UnavailableError(
                f"worker {worker.name} keeps the role {worker.role.value}: it drains, has received another order, "
                "or is needed, because others change their roles too"
            )
        return json_answer(worker_facts(worker), status=200 if is_taken else 202)

    def _worker_of(self, request: web.Request) -> AttachedWorker:
        name = request.match_info["id"]
        for worker in self._path.registry.workers:
            if worker.name == name:
                return worker
        raise NotFoundError(f"no worker {name!r} is attached")

    async def _until_answered(self, worker: AttachedWorker, is_true: Callable[[], bool]) -> None:
        """Wait for the worker's new credit. Raises UnavailableError without one."""
        if not await self._within(_ANSWER_SECONDS, lambda: is_true() or worker.gone.is_set()):
            raise UnavailableError(f"worker {worker.name} does not do so: it is stopping, or does not answer")

    async def _within(self, seconds: float, is_true: Callable[[], bool]) -> bool:
        """Wait until this is true; return False after ``seconds``."""
        if not is_true():
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._path.wait_until(is_true)
        return is_true()


def _check_flip(registry: Registry, worker: AttachedWorker, role: Role) -> None:
    """Raise InvalidRequestError if the worker drains, or requests could not be answered when it has this role."""
    if worker.capacity.credit.is_draining:
        raise InvalidRequestError(f"worker {worker.name} drains; undo that first", param="role")
    if missing := registry.missing_with(worker, role):
        names = " and no ".join(sorted(each.value for each in missing))
        raise InvalidRequestError(
            f"worker {worker.name} is needed: no {names} worker would be left", param="role"
        )
