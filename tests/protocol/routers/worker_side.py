"""A worker of several routers: production's scheduler, sessions, division of the credit, and acceptance of legs."""

from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from contract.errors import KvbatonError
from contract.identity import Role
from contract.membership import Credit
from contract.outputs import EngineOutput
from contract.requests import EngineRequest, HandOff, SendTransfer
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.stats import SchedulerStats
from protos import worker_pb2 as pb
from roles.table import ROLES, STAGES
from tests.protocol.engine_side import Connector, EngineSide, no_time
from tests.protocol.routers.scenario import RoutersScenario
from tests.protocol.routers.world import Order
from tests.protocol.scenario import VOCABULARY, asked_of
from tests.protocol.sink import LawBrokenError, Sink
from tests.protocol.world import Action
from wire.tokens import step_to_proto
from worker.lifecycle import Lifecycle, SettlingStep, next_settling_step
from worker.router_sessions import AcceptedRequests, LoadReports, RouterSessions
from worker.router_stream import RouterStream
from worker.worker import Worker, rejections

MAX_TOKENS = 10_000
BUDGET = 8


class Leg(NamedTuple):
    """A leg that the worker computes, and the session that it belongs to (None: to none)."""

    number: int
    attempt: int
    session: str | None


class WorkerLook(NamedTuple):
    """The part of a worker's state that the rules of the world read.

    actions: of the worker by itself, besides its steps. settling: production's next step between settled and unsettled.
    """

    needs_step: bool
    legs: tuple[Leg, ...]
    num_accepted: int
    actions: tuple[Action, ...]
    is_draining: bool
    settling: SettlingStep


class Stream:
    """The worker's end of a session."""

    def __init__(self, session: str, sink: Sink) -> None:
        self.session, self._sink = session, sink

    def send(self, message: pb.WorkerMessage) -> None:
        """Send a message to the router."""
        self._sink.ask("to_router", self.session, message.SerializeToString(deterministic=True))


class Offered:
    """The credit that a worker offers to all of its routers; see ``worker.draining.Drain.credit``."""

    def __init__(self, lifecycle: Lifecycle, full: Credit) -> None:
        self._lifecycle, self._full = lifecycle, full

    def __call__(self) -> Credit:
        """Return the credit."""
        return self._lifecycle.credit(self._full)


class NoDrain:
    """The drain and the reload of a worker that does neither."""

    def on_leg_accepted(self) -> None:
        """Do nothing."""


class Engine:
    """The engine's client, which answers at once."""

    info = SimpleNamespace(vocab_size=VOCABULARY)

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    async def add_request(self, request: EngineRequest) -> None:
        """Accept a request."""
        self._scheduler.add_request(request)

    async def hand_off(self, order: HandOff, _seconds: float) -> None:
        """Hand a request off."""
        self._scheduler.hand_off(order)

    async def abort(self, request_id: str, attempt: int | None, choice: int | None = None) -> None:
        """End a request."""
        self._scheduler.abort_request(request_id, attempt, choice)


class SessionsSide(EngineSide):
    """Owns the sessions of one incarnation of a worker. It stands for ``Worker`` where that accepts and cancels legs.

    A subclass has the scheduler, and calls ``begin_sessions``.
    """

    scenario: RoutersScenario
    identity = SimpleNamespace(worker_id="w")

    def begin_sessions(self, role: Role) -> None:
        """Begin without a router."""
        self.engine = Engine(self.scheduler)
        self.lifecycle = Lifecycle(role, ROLES)
        self.lifecycle.on_attach()
        self.drain = self.reload = NoDrain()
        self._accepted = AcceptedRequests(no_time)
        full = Credit(max_requests=self.scenario.credit_of(self.boot), max_tokens=MAX_TOKENS)
        self._sessions = RouterSessions(
            self.lifecycle,
            Offered(self.lifecycle, full),
            self._accepted,
            aborting(self.sink),
            reject_nothing,
            ignore,
            reports=LoadReports(clock=no_time),
        )

    def carry_out(self) -> None:
        """Carry out what the sessions ask of the engine."""
        for effect in self.sink.take():
            if effect[0] == "abort":
                self.scheduler.abort_request(*effect[1:])
            else:
                self.sink.ask(*effect)

    def open_session(self, session: str) -> None:
        """Begin a session that a router has accepted."""
        self._sessions.on_open(cast(RouterStream, Stream(session, self.sink)))

    def lose_session(self, session: str) -> None:
        """Take the end of a session, which ends its own legs, and only those."""
        others = [leg for leg in self._legs() if leg.session != session]
        finish(self._sessions.on_loss(session))
        self.carry_out()
        if self._legs() != others:
            raise LawBrokenError(f"{self.boot}: the end of {session} leaves {self._legs()}, not {others}")

    def receive(self, session: str, frame: bytes) -> None:
        """Take a router's message."""
        message = pb.RouterMessage.FromString(frame)
        finish(self._sessions.on_message(self._sessions._streams[session], message))

    def take_order(self, session: str, order: Order) -> None:
        """Accept a leg, or report that it is rejected; or cancel a request's legs up to an attempt."""
        worker, number, attempt = cast(Worker, self), order.number, order.attempt
        if order.kind == "cancel":
            finish(Worker.cancel(worker, str(number), attempt))
            return
        request = asked_of(self.scenario, number, attempt, order.num_delivered, order.transfer)
        try:
            finish(Worker.accept(worker, request, session))
        except KvbatonError as error:
            rejected = rejections(pb.Task(request_id=str(number), attempt=attempt), error)
            self._sessions._streams[session].send(pb.WorkerMessage(step=step_to_proto(rejected, None)))

    def _carry_out_hand_off(self, order: HandOff) -> None:
        finish(Worker.hand_off(cast(Worker, self), order, 1.0))

    def divide(self) -> None:
        """Divide the credit again; see ``RouterSessions.keep_divided``."""
        self._sessions._send(self._sessions._shares.plan(self._accepted.pop_uses()))

    def tidy(self) -> None:
        """Check the credit too."""
        super().tidy()
        if self._sessions._shares.num_overdrawn:
            raise LawBrokenError(f"{self.boot}: a router holds more legs than it was given")

    def look(self) -> WorkerLook:
        """Return the part that the rules read."""
        return WorkerLook(
            self.needs_step,
            tuple(self._legs()),
            len(self._accepted),
            self.own_actions(),
            self.lifecycle.is_draining,
            self._next_step(),
        )

    def own_actions(self) -> tuple[Action, ...]:
        """Return what this worker may do by itself, besides its steps."""
        return ()

    def begin_drain(self) -> None:
        """Begin a drain; see ``worker.draining.Drain.begin``."""
        self.lifecycle.drain()
        self._sessions.send_credit()

    def end_drain(self) -> None:
        """Undo a drain; see ``worker.draining.Drain.undo``."""
        self.lifecycle.undrain()
        self._sessions.send_credit()

    def settle_on(self) -> None:
        """Take the next step between settled and unsettled; see ``worker.settling.Settling``."""
        self.lifecycle.is_unsettled = self._next_step() is SettlingStep.UNSETTLE
        self._sessions.send_credit()

    def _next_step(self) -> SettlingStep:
        stats = self.scheduler.make_stats()
        is_mixed = self.lifecycle.rules.has_mixed_kv(
            num_leases=stats.num_leases, num_fetches=stats.num_fetches
        )
        return next_settling_step(self.lifecycle, self._sessions, lambda: is_mixed)

    def _legs(self) -> list[Leg]:
        """Return the legs that are computed. KV that is lent, or will be, is none."""
        requests = [request.engine_request for request in self.scheduler.requests.values()]
        return [
            Leg(int(one.request_id), one.attempt, accepted.session if accepted else None)
            for one in requests
            if not isinstance(one.transfer, SendTransfer)
            for accepted in [self._accepted.get(one.key)]
        ]

    def _send(self, outputs: dict[int, list[EngineOutput]]) -> None:
        self._sessions.send_step((one for each in outputs.values() for one in each), SchedulerStats())


class WorkerSide(SessionsSide):
    """A worker that computes whole answers."""

    def __init__(self, scenario: RoutersScenario, sink: Sink, boot: str) -> None:
        super().__init__(scenario, sink, boot, scenario.decode_blocks, BUDGET)
        self.scheduler = self.make_scheduler(STAGES, Connector(None, None))
        self.begin_sessions(Role.AGGREGATED)

    def prepare(self) -> None:
        """Do nothing before a call."""


def ignore(*_: Any) -> None:
    """Do nothing."""


async def reject_nothing(_message: pb.RouterMessage, _session: str) -> list[EngineOutput]:
    """Carry out a message about the worker itself: there is none in these worlds."""
    return []


def aborting(sink: Sink) -> Callable[[EngineRequest], Awaitable[None]]:
    """Return the abort of a lost session's request, which the copy that is called carries out."""

    async def abort(request: EngineRequest) -> None:
        sink.ask("abort", request.request_id, request.attempt)

    return abort


def finish(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("the coroutine waits for something")
