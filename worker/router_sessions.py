"""The open streams to a worker's routers, and what each of them receives: tokens, the load, and a share of the credit."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from contract.membership import Credit, RoleOrder
from contract.outputs import EngineOutput
from contract.requests import EngineRequest
from engine.scheduling.stats import SchedulerStats
from protos import worker_pb2 as pb
from wire.membership import credit_to_proto, credit_use_from_proto, load_to_proto, role_taken_to_proto
from wire.tokens import step_to_proto
from worker.accepted_requests import AcceptedRequests
from worker.credit_shares import CreditShares
from worker.lifecycle import Lifecycle
from worker.load_reports import LoadReports
from worker.router_stream import RouterStream

DIVIDE_SECONDS = 0.5
"""The time after which the credit is divided again by what each router has used."""


class RouterSessions:
    """Owns the open streams by their sessions, and the division of the worker's credit among them.

    A request belongs to the session for which it was sent: its tokens are sent on that stream only, and the loss of another
    stream does not concern it. credit: returns what the worker accepts now from all routers together. abort: aborts a
    request in the engine. on_order: carries out a message of the router of a session, and returns the outputs of legs that
    are rejected. on_report: called when a router has reported what it holds, or is lost. reports: decides when the
    load is sent on which of them.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        credit: Callable[[], Credit],
        accepted: AcceptedRequests,
        abort: Callable[[EngineRequest], Awaitable[None]],
        on_order: Callable[[pb.RouterMessage, str], Awaitable[list[EngineOutput]]],
        *on_report: Callable[[], None],
        reports: LoadReports,
    ) -> None:
        self._lifecycle = lifecycle
        self._credit = credit
        self._shares = CreditShares(credit())
        self._on_order = on_order
        self._on_report = on_report
        self._accepted = accepted
        self._abort = abort
        self._streams: dict[str, RouterStream] = {}
        self._reports = reports
        self._is_open = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """True while at least one router is attached."""
        return self._is_open.is_set()

    @property
    def has_bound_legs(self) -> bool:
        """True while a router may have a leg bound to this worker, as far as is known."""
        return self._shares.num_committed.num_requests > 0 or self._shares.num_former > 0

    @property
    def are_answered(self) -> bool:
        """True if every router has answered its last credit."""
        return self._shares.are_answered

    @property
    def num_former(self) -> int:
        """Legs of the worker's former role, and moves away from it, by the routers' last reports."""
        return self._shares.num_former

    @property
    def need_role(self) -> bool:
        """True if a router needs the worker in its role, by its last report."""
        return self._shares.need_role

    async def wait_open(self) -> None:
        """Block until a router has accepted this worker."""
        await self._is_open.wait()

    def opened(self, stream: RouterStream) -> None:
        """See StreamListener."""
        self._streams[stream.session] = stream
        self._is_open.set()
        if self._lifecycle.role_epoch:
            stream.send(self._role())
        self._send(self._shares.open(stream.session, self._credit(), self._accepted.take_uses()))

    async def received(self, stream: RouterStream, message: pb.RouterMessage) -> None:
        """See StreamListener."""
        if message.HasField("credit_use"):
            use = credit_use_from_proto(message.credit_use)
            self._send(self._shares.report(stream.session, use))
            self._note_report()
        elif rejected := await self._on_order(message, stream.session):
            stream.send(pb.WorkerMessage(step=step_to_proto(rejected, None)))

    async def lost(self, session: str) -> None:
        """Abort the requests of a lost stream, and only those; give its share of the credit to the others."""
        del self._streams[session]
        self._reports.forget(session)
        if not self._streams:
            self._is_open.clear()
        for request in self._accepted.of_session(session):
            await self._abort(request)
        self._send(self._shares.close(session, self._accepted.take_uses()))
        self._note_report()

    def send_credit(self) -> None:
        """Divide the worker's credit anew and send every router its share, since the credit has changed."""
        self._send(self._shares.set_total(self._credit(), self._accepted.take_uses()))

    def send_role(self) -> None:
        """Report the worker's role to every router, since it has changed."""
        for stream in self._streams.values():
            stream.send(self._role())

    def send_step(self, outputs: Iterable[EngineOutput], stats: SchedulerStats) -> None:
        """Send the outputs of one step, each to the router of its request; those of lost streams are dropped."""
        by_session: dict[str, list[EngineOutput]] = {}
        for output in outputs:
            session = self._accepted.session_of(output.key)
            if output.timings is not None:
                held = self._accepted.seconds_since_order(output.key)
                output.timings = replace(output.timings, held_seconds=held)
            if output.is_leg_finished:
                self._accepted.finish(output.key)
            if session is not None:
                by_session.setdefault(session, []).append(output)
        for session, own in by_session.items():
            if stream := self._streams.get(session):
                load = self._reports.next(session, stats)
                stream.send(pb.WorkerMessage(step=step_to_proto(own, load)))

    def send_load(self, stats: SchedulerStats, *, is_idle: bool = False) -> None:
        """Send the load to every router to which a report is due. is_idle: the engine has no work."""
        for session, stream in self._streams.items():
            if load := self._reports.next(session, stats, is_idle=is_idle):
                stream.send(pb.WorkerMessage(load=load_to_proto(load)))

    async def keep_divided(self, stats: Callable[[], SchedulerStats]) -> None:
        """Divide the credit again and again while there are several routers. A router without tokens gets the load here."""
        while True:
            await asyncio.sleep(DIVIDE_SECONDS)
            if len(self._streams) > 1:
                self._send(self._shares.plan(self._accepted.take_uses()))
                self.send_load(stats())

    def debug_state(self) -> dict[str, Any]:
        """Return each router's share of the credit and what the worker has of it, as plain data.

        num_overdrawn_credits: reports of routers that held more legs than they were given.
        """
        routers = [
            {
                "router_id": stream.router_id,
                "address": stream.address,
                "max_requests": self._shares.share_of(session).num_requests,
                "max_tokens": self._shares.share_of(session).num_tokens,
                "num_requests": len(self._accepted.of_session(session)),
                "num_unread_bytes": stream.num_unread_bytes,
            }
            for session, stream in self._streams.items()
        ]
        return {"routers": routers, "num_overdrawn_credits": self._shares.num_overdrawn}

    def _note_report(self) -> None:
        for note in self._on_report:
            note()

    def _role(self) -> pb.WorkerMessage:
        taken = RoleOrder(role=self._lifecycle.role.value, epoch=self._lifecycle.role_epoch)
        return pb.WorkerMessage(role_taken=role_taken_to_proto(taken))

    def _send(self, credits: Mapping[str, Credit]) -> None:
        for session, credit in credits.items():
            self._streams[session].send(pb.WorkerMessage(credit=credit_to_proto(credit)))
