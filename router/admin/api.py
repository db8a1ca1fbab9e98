"""The admin API of a router, on its own port.

Operators list workers (``GET /admin/workers``) and order them to drain, to serve again or to take another role
(``POST /admin/workers/ID/drain``, ``/undrain``, ``/flip``), and drop the prefix caches of all of them
(``POST /admin/reset_prefix_cache``); ``reloading.py`` has ``POST /admin/reload_weights``. The autoscaler sends its decision
(``PUT /admin/scaling``), which the router publishes, and asks who may scale (``PUT /admin/scaling/lease``).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from aiohttp import web

from contract.addresses import is_loopback
from contract.decoding import decode_outside, json_decoder
from contract.errors import InvalidRequestError, KvbatonError, NotFoundError, UnavailableError
from contract.identity import worker_role
from contract.membership import DrainOrder, RoleOrder
from contract.scaling import AUTOSCALER, ScalingLease, ScalingReport
from router.admin.scaling import ScalingLeases, ScalingReports
from router.client_access import ClientAccess
from router.http.boundary import boundary
from router.intake.cancellation import CancellableRequests
from router.migration.standing_orders import OPERATOR, StandingOrders
from router.request_path import RequestPath
from router.settings import RouterSettings
from router.workers.attached_worker import AttachedWorker
from router.workers.registry import group_of
from router.workers.worker_facts import worker_facts
from serving.admin import json_answer, seconds_in
from serving.admin_access import AdminAccess
from serving.errors import openai_error

_DECODER: msgspec.json.Decoder[ScalingReport] = json_decoder(ScalingReport)
_LEASE_DECODER: msgspec.json.Decoder[ScalingLease] = json_decoder(ScalingLease)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
logger = logging.getLogger(__name__)
_ANSWER_SECONDS = 5.0
"""The time in which a worker answers an order with its credit."""


def admin_access(settings: RouterSettings, clients: ClientAccess) -> AdminAccess:
    """Return the access to this router's actions. A client's API key is never enough: operators can stop workers.

    Without admin keys it is closed to all if clients need API keys, or if other machines can reach the port.
    Raises SettingError.
    """
    why_closed = None
    if clients.keys.are_required:
        why_closed = "this router has API keys, so operators need a key too"
    elif not is_loopback(settings.admin):
        why_closed = "other machines can reach this port, so operators need a key"
    return AdminAccess(settings, why_closed=why_closed, wrong_keys=clients.wrong_keys)


def answering(handler: _Handler) -> _Handler:
    """Return a handler that answers errors as the public API does."""
    answer = boundary(CancellableRequests())

    async def handle(request: web.Request) -> web.StreamResponse:
        return await answer(request, handler)

    return handle


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
            web.post("/admin/reset_prefix_cache", answering(self._reset_prefix_caches)),
        ]

    async def _list(self, _: web.Request) -> web.Response:
        return json_answer(self._facts())

    async def _drain(self, request: web.Request) -> web.Response:
        """Send the order to drain: 200 once the worker is empty or gone, 202 if it is not within ``wait`` seconds.

        A data-parallel group drains as a whole.
        """
        worker = self._worker_of(request)
        group = group_of(self._path.registry.workers, worker)
        deadline = seconds_in(request, "deadline")
        wait = seconds_in(request, "wait") or 0.0
        for each in group:
            logger.info("worker %s is drained by %s", each.name, self._access.requester(request))
            self._standing.on_drain(each, AUTOSCALER if request.query.get("by") == AUTOSCALER else OPERATOR)
            each.drain(DrainOrder(deadline_seconds=deadline))
        await self._until_answered(group, lambda each: each.capacity.credit.is_draining)
        is_empty = await self._within(
            wait, lambda: all(each.is_empty or each.gone.is_set() for each in group)
        )
        return json_answer(worker_facts(worker), status=200 if is_empty else 202)

    async def _undrain(self, request: web.Request) -> web.Response:
        """Send the order to serve again: 200 once the worker does. Raises UnavailableError if it is stopping."""
        worker = self._worker_of(request)
        group = group_of(self._path.registry.workers, worker)
        for each in group:
            logger.info(
                "the drain of worker %s is cancelled by %s", each.name, self._access.requester(request)
            )
            self._standing.on_undrain(each)
            each.undrain()
        await self._until_answered(group, lambda each: not each.capacity.credit.is_draining)
        return json_answer(worker_facts(worker))

    async def _flip(self, request: web.Request) -> web.Response:
        """Send the order to take a role: 200 once the worker has it, 202 if it has not within ``wait`` seconds.

        Raises UnavailableError if the worker has kept its role.
        """
        worker = self._worker_of(request)
        role = worker_role(request.query.get("role", ""))
        wait = seconds_in(request, "wait") or 0.0
        if worker.capacity.credit.is_draining:
            raise InvalidRequestError(f"worker {worker.name} drains; undo that first", param="role")
        # requests that are sent now must find workers of all roles once this one has changed
        if missing := self._path.registry.missing_with(worker, role):
            names = " and no ".join(sorted(each.value for each in missing))
            raise InvalidRequestError(
                f"worker {worker.name} is needed: no {names} worker would be left", param="role"
            )
        logger.info(
            "worker %s is made a %s worker by %s", worker.name, role.value, self._access.requester(request)
        )
        group = group_of(self._path.registry.workers, worker)
        # the epoch grows with each order of any router, by which a worker finds the newest one
        epoch = time.time_ns() // 1000
        for each in group:
            each.flip(RoleOrder(role=role.value, epoch=epoch))

        def is_done(each: AttachedWorker) -> bool:
            # over: it serves in the new role, which its first credit shows, or it has kept its own
            capacity = each.capacity
            is_over = not capacity.ordered and (each.role is not role or capacity.credit.max_requests > 0)
            return each.gone.is_set() or is_over

        is_taken = await self._within(wait, lambda: all(map(is_done, group)))
        if is_taken and worker.role is not role and not worker.gone.is_set():
            raise UnavailableError(
                f"worker {worker.name} keeps the role {worker.role.value}: it drains, has received another order, "
                "or is needed, because others change their roles too"
            )
        return json_answer(worker_facts(worker), status=200 if is_taken else 202)

    async def _reset_prefix_caches(self, request: web.Request) -> web.Response:
        """Drop the prefix cache of every attached worker: 200 if all have, else 409 with the reasons of the others."""
        logger.info("the prefix caches are dropped by %s", self._access.requester(request))
        workers = list(self._path.registry.workers)
        calls = (worker.calls.reset_prefix_cache() for worker in workers)
        reset: list[str] = []
        refused: dict[str, str] = {}
        for worker, result in zip(workers, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(result, KvbatonError):
                refused[worker.name] = result.message
            elif result is not None:
                raise result
            else:
                reset.append(worker.name)
        answer: dict[str, Any] = {"workers": reset}
        if refused:
            error = InvalidRequestError(
                f"the prefix cache is not dropped everywhere: {'; '.join(refused.values())}"
            )
            refusals = [{"id": name, "reason": reason} for name, reason in refused.items()]
            answer |= {**openai_error(error), "refused": refusals}
        return json_answer(answer, status=409 if refused else 200)

    def _worker_of(self, request: web.Request) -> AttachedWorker:
        name = request.match_info["id"]
        for worker in self._path.registry.workers:
            if worker.name == name:
                return worker
        raise NotFoundError(f"no worker {name!r} is attached")

    async def _until_answered(
        self, group: Sequence[AttachedWorker], is_true: Callable[[AttachedWorker], bool]
    ) -> None:
        """Wait for the new credit of each worker. Raises UnavailableError without one."""
        if not await self._within(
            _ANSWER_SECONDS, lambda: all(is_true(each) or each.gone.is_set() for each in group)
        ):
            names = ", ".join(each.name for each in group if not is_true(each))
            raise UnavailableError(f"worker {names} does not do so: it is stopping, or does not answer")

    async def _within(self, seconds: float, is_true: Callable[[], bool]) -> bool:
        """Wait until this is true; return False after ``seconds``."""
        if not is_true():
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._path.wait_until(is_true)
        return is_true()


class ScalingAdmin:
    """Serves the API on a router's admin port. pools: returns the load of each pool, with the decision about it."""

    def __init__(
        self, reports: ScalingReports, leases: ScalingLeases, pools: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._reports = reports
        self._leases = leases
        self._pools = pools

    def routes(self) -> list[web.RouteDef]:
        """Return all paths."""
        return [
            web.put("/admin/scaling", answering(self._put)),
            web.put("/admin/scaling/lease", answering(self._lease)),
        ]

    async def _put(self, request: web.Request) -> web.Response:
        """Take a report. Raises InvalidRequestError if it is none."""
        report = decode_outside(
            _DECODER.decode,
            await request.read(),
            lambda reason: InvalidRequestError(f"no decision: {reason}"),
        )
        self._reports.record(report)
        return json_answer({"pools": self._pools()})

    async def _lease(self, request: web.Request) -> web.Response:
        """Grant, prolong, refuse or take back the lease; answer with who has it. Raises InvalidRequestError."""
        wanted = decode_outside(
            _LEASE_DECODER.decode,
            await request.read(),
            lambda reason: InvalidRequestError(f"no lease: {reason}"),
        )
        return json_answer(msgspec.to_builtins(self._leases.ask(wanted)))
