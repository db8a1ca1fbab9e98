"""One worker: an engine client, the orders of routers that feed it, and the streams on which its tokens leave."""

import asyncio
import logging
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from contract.errors import InternalError, InvalidRequestError, KvbatonError, NotFoundError, UnavailableError
from contract.membership import DrainOrder, LoadedWeights, RoleOrder
from contract.outputs import EngineOutput, FinishReason
from contract.requests import MAX_CHOICES, EngineRequest, HandOff
from engine.client import EngineClient
from protos import worker_pb2 as pb
from serving.admin import facts_of
from serving.cluster_tls import ClusterTls, worker_tls
from serving.gpu_memory import reader_of
from wire.legs import cancel_from_proto
from wire.messages import BadNumberError, from_proto, to_proto
from worker.draining import Drain, Emptiness
from worker.flipping import Flip
from worker.lifecycle import Lifecycle
from worker.registration import WorkerIdentity, registration_of
from worker.reloading import Reload
from worker.role_rules import LegCall, Roles
from worker.router_addresses import RouterAddresses
from worker.router_links import RouterLinks
from worker.router_sessions import AcceptedRequests, LoadReports, RouterSessions
from worker.router_stream import RouterAddress
from worker.settings import WorkerSettings, visible_gpus
from worker.settling import Settling

logger = logging.getLogger(__name__)
GOODBYE_SECONDS = 1.0


class Orders:
    """Carries out the messages of routers, those of one stream in the sequence in which they were sent."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker

    async def carry_out(self, message: pb.RouterMessage, session: str) -> list[EngineOutput]:
        """Carry out a message that came on this session's stream, and return an output for each choice that is rejected.

        A message of a later version is ignored, and so is one about the worker itself that comes too late. Raises
        BadNumberError for a number out of its range, but for one of a leg, which is rejected.
        """
        try:
            match message.WhichOneof("message"):
                case "orders":
                    return await self._carry_out_all(message.orders, session)
                case "drain":
                    self._worker.drain.begin(
                        from_proto(DrainOrder, message.drain).deadline_seconds, by="a router"
                    )
                case "undrain":
                    self._worker.drain.undo(by="a router")
                case "role_change":
                    self._worker.flip.begin(from_proto(RoleOrder, message.role_change))
        except BadNumberError:  # ends the stream: what else this router sends cannot be believed either
            raise
        except KvbatonError as error:
            logger.info("ignored an order of the router: %s", error.message)
        return []

    async def _carry_out_all(self, orders: pb.Orders, session: str) -> list[EngineOutput]:
        rejected: list[EngineOutput] = []
        for order in orders.orders:
            match order.WhichOneof("order"):
                case "prefill":
                    rejected += await self._start(LegCall.PREFILL, order.prefill, session)
                case "decode":
                    rejected += await self._start(LegCall.DECODE, order.decode, session)
                case "embed":
                    rejected += await self._start(LegCall.EMBED, order.embed, session)
                case "cancel":
                    await self._worker.cancel(*cancel_from_proto(order.cancel))
        return rejected

    async def _start(
        self, call: LegCall, leg: pb.PrefillRequest | pb.DecodeRequest | pb.EmbedLegRequest, session: str
    ) -> list[EngineOutput]:
        """Accept a leg that the worker's role serves, or return the outputs of its rejection."""
        try:
            lifecycle = self._worker.lifecycle
            if (read := lifecycle.reader_of(call)) is None:
                raise InternalError(f"a {lifecycle.role.value} worker does not serve {call.value}")
            await self._worker.accept(await read(leg, self._worker.model_folder), session)
        except KvbatonError as error:
            return rejections(leg.task, error)
        return []


def rejections(task: pb.Task, error: KvbatonError) -> list[EngineOutput]:
    """Return the outputs with which a leg is rejected: one for each of its choices, up to ``MAX_CHOICES``."""
    return [
        EngineOutput(
            request_id=task.request_id,
            attempt=task.attempt,
            choice=choice,
            finish_reason=FinishReason.ERROR,
            error_kind=error.kind.value,
            error_message=error.message,
            error_param=error.param,
            is_rejected=True,
        )
        for choice in range(task.choice, task.choice + max(1, min(task.num_choices, MAX_CHOICES)))
    ]


class Worker:
    """Owns the requests that routers gave to this process, from acceptance until the engine is done with them."""

    def __init__(
        self, identity: WorkerIdentity, roles: Roles, settings: WorkerSettings, engine: EngineClient
    ) -> None:
        self.identity = identity
        self.engine = engine
        self.lifecycle = Lifecycle(identity.role, roles)
        self._settings = settings

        # The sessions are made last, and call the other parts; so these get functions that look them up when they run.
        def send_credit() -> None:
            self._sessions.send_credit()

        emptiness, before_load = (
            Emptiness(engine, lambda: self.num_requests, lambda: self._sessions.has_bound_legs, send_credit)
            for _ in range(2)
        )
        settling = Settling(self.lifecycle, lambda: self._sessions, self._has_mixed_kv)
        drain_times = (settings.drain_seconds, settings.drain_hold_seconds)
        self.drain = Drain(self.lifecycle, emptiness, settling, send_credit, *drain_times)
        self.flip = Flip(self.lifecycle, settling, lambda: self._sessions)
        self.reload = Reload(self.lifecycle, engine, before_load, self._publish, send_credit)
        self._accepted = AcceptedRequests()
        self._sessions = RouterSessions(
            self.lifecycle,
            lambda: self.drain.credit(self.lifecycle.rules.credit(settings, engine.info)),
            self._accepted,
            self._abort_request,
            Orders(self).carry_out,
            emptiness.note_report,
            before_load.note_report,
            settling.note_report,
            reports=LoadReports(reader_of(engine.info.device, engine.info.num_ranks, visible_gpus())),
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
            to_proto(pb.Registration, registration),
            self._sessions,
        )

        async def note_attached() -> None:
            await self._sessions.wait_open()
            self.lifecycle.on_attach()

        ended_by: list[BaseException] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._links.run())
                tasks.create_task(note_attached())
                tasks.create_task(self._send_steps())
                tasks.create_task(self._report_load())
                tasks.create_task(self._sessions.keep_measured())
                tasks.create_task(self.reload.until_lost())
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
        self.lifecycle.leave()  # before the aborts: a leg that is accepted meanwhile would be left
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
        # Recorded only when the engine has it: a refused request has no output that would remove it.
        await self.engine.add_request(request)
        self._accepted.add(request, session, since)
        self.drain.on_leg_accepted()
        self.reload.on_leg_accepted()

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

    def _publish(self, loaded: LoadedWeights) -> None:
        assert self._links is not None, "a router has ordered the reload"
        self._links.set_weights(loaded)

    def _has_mixed_kv(self) -> bool:
        stats = self.engine.stats
        return self.lifecycle.rules.has_mixed_kv(num_leases=stats.num_leases, num_fetches=stats.num_fetches)

    async def _abort_request(self, request: EngineRequest) -> None:
        await self.engine.abort(request.request_id, request.attempt)

    async def _send_steps(self) -> None:
        """Send the new tokens of each step to their routers. Raises UnavailableError when the engine died.

        The final outputs of a dead engine are not sent: its requests are not at fault, and when the streams end the routers
        continue them on other workers.
        """
        async for outputs in self.engine.steps():
            if self.engine.died.is_set():
                break
            self._sessions.send_step(outputs, self.engine.stats)
            self.flip.settling.note_report()  # it may have nothing of the former role any more
        raise UnavailableError(f"the engine of worker {self.identity.worker_id} has stopped")

    async def _report_load(self) -> None:
        """Send the load when the engine becomes idle: blocks may have been released since the last tokens."""
        while True:
            await self.engine.idled.wait()
            self.engine.idled.clear()
            self._sessions.send_load(self.engine.stats, is_idle=True)
            self.flip.settling.note_report()  # it may have nothing of the former role any more
