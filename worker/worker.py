"""One worker: an engine client, the gRPC service that feeds it, and the stream on which its tokens leave."""

import asyncio
import logging
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from contract.errors import CancelledError, InvalidRequestError, KvbatonError, NotFoundError, UnavailableError
from contract.requests import EngineRequest, HandOff
from engine.client import EngineClient
from protos import worker_pb2 as pb
from serving.cluster_tls import ClusterTls, worker_tls
from serving.process_facts import facts_of
from wire.membership import credit_to_proto, load_to_proto, registration_to_proto
from wire.tokens import step_to_proto
from worker.draining import Drain
from worker.early_cancels import EarlyCancels
from worker.lifecycle import Lifecycle
from worker.load_reports import LoadReports
from worker.orders import carry_out
from worker.registration import WorkerIdentity, credit_of, registration_of
from worker.router_stream import RouterAddress, RouterStream
from worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

GOODBYE_SECONDS = 1.0


class Worker:
    """Owns the requests that a router gave to this process, from acceptance until the engine is done with them."""

    def __init__(self, identity: WorkerIdentity, settings: WorkerSettings, engine: EngineClient) -> None:
        self.identity = identity
        self.engine = engine
        self.lifecycle = Lifecycle(identity.role)
        self._settings = settings
        self.drain = Drain(
            self.lifecycle, engine, lambda: self.num_requests, self._send_credit, settings.drain_seconds
        )
        self._stream: RouterStream | None = None
        self._running = asyncio.Event()
        self._accepted: dict[str, EngineRequest] = {}
        self._early_cancels = EarlyCancels()
        self._load_reports = LoadReports()

    @property
    def is_ready(self) -> bool:
        """True while a router is attached."""
        return self._stream is not None and self._stream.is_attached

    def missing(self) -> str | None:
        """Return why the worker cannot do its work at the moment; None if it can."""
        if (complaint := self.engine.complaint) is not None:
            return f"the engine is not healthy: {complaint}"
        return None if self.is_ready else "no router is attached"

    async def wait_ready(self) -> None:
        """Block until a router has accepted this worker."""
        await self._running.wait()
        if self._stream:
            await self._stream.wait_attached()

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
        """Register at the router and send tokens to it until cancelled. Raises UnavailableError when the engine died."""
        registration = registration_of(self.identity, self._settings, self.engine, address, admin_address)
        self._stream = RouterStream(
            RouterAddress(self._settings.router, self.tls, self._settings.peer_timeout_seconds),
            registration_to_proto(registration),
            self._credit,
            self.abort_all,
            lambda message: carry_out(message, self.drain),
        )
        self._running.set()
        ended_by: list[BaseException] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._stream.run())
                tasks.create_task(self._note_attached(self._stream))
                tasks.create_task(self._send_steps(self._stream))
                tasks.create_task(self._report_load(self._stream))
        except* KvbatonError as group:
            ended_by.extend(group.exceptions)
        if ended_by:  # Python 3.11.2 wraps an error that is raised inside except* in a group again
            raise ended_by[0]

    async def stop(self, at_once: asyncio.Event) -> None:
        """Drain, and leave when nothing is left or at ``at_once``."""
        await self.drain.stop(at_once)
        await self.leave()

    async def leave(self) -> None:
        """Abort everything and send goodbye to the router, so that it does not count this worker as lost."""
        self.drain.close()
        self.lifecycle.leave()
        await self.abort_all()
        if self._stream:
            with suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_SECONDS):
                    await self._stream.leave()

    async def accept(self, request: EngineRequest, session: str = "") -> None:
        """Give a request to the engine; its tokens are sent on the stream of this session (empty: on any open one).

        Raises InvalidRequestError, UnavailableError if that stream is not open, CancelledError for an early cancel.
        """
        self.lifecycle.check_open()
        if self._stream is None or not self._stream.is_attached:
            raise UnavailableError(f"worker {self.identity.worker_id} is not attached to a router")
        if session not in ("", self._stream.session):
            raise UnavailableError(
                f"worker {self.identity.worker_id} has lost the stream on which this request was sent"
            )
        cancelled = [
            choice
            for choice in request.choices
            if self._early_cancels.covers(request.request_id, request.attempt, choice)
        ]
        if len(cancelled) == request.num_choices:
            raise CancelledError(f"request {request.request_id} was cancelled before it arrived")
        request.check(self.engine.info.vocab_size)
        if any(key in self._accepted for key in request.keys):
            raise InvalidRequestError(
                f"request {request.key} is already running; a replay needs a higher attempt"
            )
        await self.engine.add_request(request)
        self._accepted.update(dict.fromkeys(request.keys, request))
        self.drain.leg_accepted()
        for choice in cancelled:
            await self.engine.abort(request.request_id, request.attempt, choice)

    async def hand_off(self, order: HandOff, seconds: float) -> None:
        """Hand a choice off while it decodes; see ``EngineClient.hand_off``. Its lease may outlive every request here."""
        if order.key not in self._accepted:
            raise NotFoundError(f"worker {self.identity.worker_id} does not have request {order.key}")
        await self.engine.hand_off(order, seconds)

    async def cancel(self, request_id: str, attempt: int, choice: int | None = None) -> None:
        """Abort a choice of a request (None: all) up to ``attempt``; a cancel of an unknown request is remembered."""
        here = (r for r in self._accepted.values() if r.request_id == request_id and r.attempt <= attempt)
        if not any(choice is None or choice in request.choices for request in here):
            self._early_cancels.add(request_id, attempt, choice)
        await self.engine.abort(request_id, attempt, choice)

    async def abort_all(self) -> None:
        """Abort everything: the router that asked for it is gone."""
        for request in list(self._accepted.values()):
            await self.engine.abort(request.request_id, request.attempt)

    async def debug_state(self) -> dict[str, Any]:
        """Return blocks, leases, transfers and requests as plain data, and facts about the engine process."""
        state: dict[str, Any] = await self.engine.call("debug_state")
        return {
            "worker_id": self.identity.worker_id,
            "boot_id": self.identity.boot_id,
            "role": self.lifecycle.role.value,
            "state": self.lifecycle.state.value,
            "attached": self.is_ready,
            "num_accepted": self.num_requests,
            "engine_process": facts_of(await self.engine.call("pid")),
            **state,
        }

    def _credit(self) -> pb.Credit:
        return credit_to_proto(self.drain.credit(credit_of(self.identity, self._settings, self.engine)))

    def _send_credit(self) -> None:
        if self._stream:
            self._stream.send(pb.WorkerMessage(credit=self._credit()))

    async def _note_attached(self, stream: RouterStream) -> None:
        await stream.wait_attached()
        self.lifecycle.attached()

    async def _send_steps(self, stream: RouterStream) -> None:
        """Send the new tokens of each step to the router in one message. Raises UnavailableError when the engine died.

        The final outputs of a dead engine are not sent: its requests are not at fault, and when the stream ends the router
        continues them on another worker.
        """
        async for outputs in self.engine.steps():
            if self.engine.died.is_set():
                break
            for output in outputs:
                if output.is_leg_finished:
                    self._accepted.pop(output.key, None)
            if outputs:
                load = self._load_reports.next(stream.session, self.engine.stats)
                step = step_to_proto(outputs, load)
                stream.send(pb.WorkerMessage(step=step))
        raise UnavailableError(f"the engine of worker {self.identity.worker_id} has stopped")

    async def _report_load(self, stream: RouterStream) -> None:
        """Send the load when the engine becomes idle: blocks may have been released since the last tokens."""
        while True:
            await self.engine.idled.wait()
            self.engine.idled.clear()
            if load := self._load_reports.next(stream.session, self.engine.stats, is_idle=True):
                stream.send(pb.WorkerMessage(load=load_to_proto(load)))
