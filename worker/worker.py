"""One worker: an engine client, the gRPC service that feeds it, and the streams on which its tokens leave."""

import asyncio
import logging
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from contract.errors import InvalidRequestError, KvbatonError, NotFoundError, UnavailableError
from contract.identity import Role
from contract.requests import EngineRequest, HandOff
from engine.client import EngineClient
from engine.scheduling.stats import SchedulerStats
from serving.cluster_tls import ClusterTls, worker_tls
from serving.gpu_memory import reader_of
from serving.process_facts import facts_of
from wire.membership import registration_to_proto
from worker.accepted_requests import AcceptedRequests
from worker.draining import Drain
from worker.emptiness import Emptiness
from worker.flipping import Flip
from worker.lifecycle import Lifecycle
from worker.load_reports import LoadReports
from worker.orders import Orders
from worker.registration import WorkerIdentity, credit_of, registration_of
from worker.router_addresses import RouterAddresses
from worker.router_links import RouterLinks
from worker.router_sessions import RouterSessions
from worker.router_stream import RouterAddress
from worker.settings import WorkerSettings, visible_gpus
from worker.settling import Settling
from worker.transitions import has_mixed_kv

logger = logging.getLogger(__name__)

GOODBYE_SECONDS = 1.0


class Worker:
    """Owns the requests that routers gave to this process, from acceptance until the engine is done with them."""

    def __init__(self, identity: WorkerIdentity, settings: WorkerSettings, engine: EngineClient) -> None:
        self.identity = identity
        self.engine = engine
        self.lifecycle = Lifecycle(identity.role)
        self._settings = settings
        emptiness = Emptiness(
            engine,
            lambda: self.num_requests,
            lambda: self._sessions.has_bound_legs,
            lambda: self._sessions.send_credit(),
        )
        settling = Settling(
            self.lifecycle, lambda: self._sessions, lambda: _has_mixed_kv(self.lifecycle.role, engine.stats)
        )
        self.drain = Drain(
            self.lifecycle,
            emptiness,
            settling,
            lambda: self._sessions.send_credit(),
            settings.drain_seconds,
            settings.drain_hold_seconds,
        )
        self.flip = Flip(
            self.lifecycle,
            settling,
            lambda: self._sessions.send_credit(),
            lambda: self._sessions.send_role(),
        )
        self._gpus = reader_of(engine.info.device, engine.info.num_ranks, visible_gpus())
        self._accepted = AcceptedRequests()
        self._sessions = RouterSessions(
            self.lifecycle,
            lambda: self.drain.credit(credit_of(self.lifecycle.role, settings, engine)),
            self._accepted,
            self._abort_request,
            Orders(self, self.drain, self.flip).carry_out,
            emptiness.note_report,
            settling.note_report,
            reports=LoadReports(lambda: self._gpus.memory),
        )
        self._links: RouterLinks | None = None

    @property
    def is_ready(self) -> bool:
        """True while a router is attached."""
        return self._sessions.is_open

    def missing(self) -> str | None:
        """Return why the worker cannot do its work at the moment; None if it can."""
        if (complaint := self.engine.complaint) is not None:
            return f"the engine is not healthy: {complaint}"
        return None if self.is_ready else "no router is attached"

    async def wait_ready(self) -> None:
        """Block until a router has accepted this worker, and a few seconds at most for its other routers."""
        await self._sessions.wait_open()
        if self._links:
            await self._links.wait_tried()

    @property
    def model_folder(self) -> Path:
        """The model's folder."""
        return self._settings.model

    @cached_property
    def tls(self) -> ClusterTls:
        """TLS credentials of this worker in its cluster. Raises SettingError without a usable secret."""
        return worker_tls(self._settings.read_secret(), self.identity.worker_id, self.identity.boot_id)

    @property
    def num_requests(self) -> int:
        """Number of requests accepted and not finished."""
        return len(self._accepted)

    async def run(self, address: str, admin_address: str) -> None:
        """Register at all routers and send tokens to them until cancelled. Raises UnavailableError when the engine died."""
        registration = registration_of(self.identity, self._settings, self.engine, address, admin_address)
        self._links = RouterLinks(
            RouterAddresses(self._settings.routers),
            lambda name: RouterAddress(name, self.tls, self._settings.peer_timeout_seconds),
            registration_to_proto(registration),
            self._sessions,
        )
        ended_by: list[BaseException] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._links.run())
                tasks.create_task(self._note_attached())
                tasks.create_task(self._send_steps())
                tasks.create_task(self._report_load())
                tasks.create_task(self._gpus.keep_read())
                tasks.create_task(self._sessions.keep_divided(lambda: self.engine.stats))
        except* KvbatonError as group:
            ended_by.extend(group.exceptions)
        if ended_by:  # Python 3.11.2 wraps an error that is raised inside except* in a group again
            raise ended_by[0]

    async def stop(self, at_once: asyncio.Event) -> None:
        """Drain, and leave when nothing is left or at ``at_once``."""
        await self.drain.stop(at_once)
        await self.leave()

    async def leave(self) -> None:
        """Abort everything and send goodbye to the routers, so that they do not count this worker as lost."""
        self.flip.close()
        self.drain.close()
        self.lifecycle.leave()
        await self.abort_all()
        if self._links:
            with suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_SECONDS):
                    await self._links.leave()

    async def accept(self, request: EngineRequest, session: str) -> None:
        """Give a request to the engine; its tokens are sent on the stream of this session.

        Raises InvalidRequestError, UnavailableError when the worker has left.
        """
        since = self._accepted.clock()
        self.lifecycle.check_open()
        request.check(self.engine.info.vocab_size)
        if any(key in self._accepted for key in request.keys):
            raise InvalidRequestError(
                f"request {request.key} is already running; a replay needs a higher attempt"
            )
        await self.engine.add_request(request)
        self._accepted.add(request, session, since)
        self.drain.leg_accepted()

    async def hand_off(self, order: HandOff, seconds: float) -> None:
        """Hand a choice off while it decodes; see ``EngineClient.hand_off``. Its lease may outlive every request here."""
        if order.key not in self._accepted:
            raise NotFoundError(f"worker {self.identity.worker_id} does not have request {order.key}")
        await self.engine.hand_off(order, seconds)

    async def prepare(self, request: EngineRequest) -> None:
        """Prepare for an answer that is going to be moved here; see ``EngineClient.prepare``."""
        self.lifecycle.check_open()
        await self.engine.prepare(request)

    async def cancel(self, request_id: str, attempt: int, choice: int | None = None) -> None:
        """Abort a choice of a request (None: all) up to ``attempt``. Unknown ones are ignored."""
        await self.engine.abort(request_id, attempt, choice)

    async def abort_all(self) -> None:
        """Abort everything: this worker ends."""
        for request in self._accepted:
            await self._abort_request(request)

    async def debug_state(self) -> dict[str, Any]:
        """Return blocks, leases, transfers and requests as plain data, and facts about the engine process."""
        state: dict[str, Any] = await self.engine.call("debug_state")
        return {
            "worker_id": self.identity.worker_id,
            "boot_id": self.identity.boot_id,
            "role": self.lifecycle.role.value,
            "state": self.lifecycle.state.value,
            "attached": self.is_ready,
            **self._sessions.debug_state(),
            "num_accepted": self.num_requests,
            "engine_process": facts_of(await self.engine.call("pid")),
            **state,
        }

    async def _abort_request(self, request: EngineRequest) -> None:
        await self.engine.abort(request.request_id, request.attempt)

    async def _note_attached(self) -> None:
        await self._sessions.wait_open()
        self.lifecycle.attached()

    async def _send_steps(self) -> None:
        """Send the new tokens of each step to their routers. Raises UnavailableError when the engine died.

        The final outputs of a dead engine are not sent: its requests are not at fault, and when the streams end the routers
        continue them on other workers.
        """
        async for outputs in self.engine.steps():
            if self.engine.died.is_set():
                break
            self._sessions.send_step(outputs, self.engine.stats)
            self.flip.note_engine_report()
        raise UnavailableError(f"the engine of worker {self.identity.worker_id} has stopped")

    async def _report_load(self) -> None:
        """Send the load when the engine becomes idle: blocks may have been released since the last tokens."""
        while True:
            await self.engine.idled.wait()
            self.engine.idled.clear()
            self._sessions.send_load(self.engine.stats, is_idle=True)
            self.flip.note_engine_report()


def _has_mixed_kv(role: Role, stats: SchedulerStats) -> bool:
    return has_mixed_kv(role, num_leases=stats.num_leases, num_fetches=stats.num_fetches)
