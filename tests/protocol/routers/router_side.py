"""One of several routers: production's credit, views, policy and delivery, and the attempts of ``RouterSide``."""

from typing import NamedTuple, cast

from msgspec.structs import replace

from contract.errors import ErrorKind
from contract.identity import Role
from contract.membership import Registration
from protos import worker_pb2 as pb
from router.attached_worker import AttachedWorker
from router.capacity import CreditHold
from router.legs import Placement
from router.order_stream import OrderStream
from router.running_shares import Held
from router.views import WorkerView
from router.worker_calls import WorkerCalls
from router.worker_latency import WorkerLatency
from tests.protocol.engine_side import no_time
from tests.protocol.router_request import RouterRequest
from tests.protocol.router_side import RouterSide
from tests.protocol.routers.scenario import RoutersScenario
from tests.protocol.routers.worker_side import ignore
from tests.protocol.sink import Sink
from wire.membership import credit_from_proto
from wire.tokens import output_from_proto

ELSEWHERE = "another router's"
_MAYBE_ACCEPTED = (ErrorKind.WORKER_LOST, ErrorKind.DEADLINE)
_MAX_LENGTH = 64


class RouterLook(NamedTuple):
    """The part of a router's state that the rules of the world read.

    held: legs that are bound, by session. limits: its credit, by session. bound: (request, attempt, session) of each leg.
    """

    held: dict[str, int]
    limits: dict[str, int]
    bound: frozenset[tuple[int, int, str | None]]
    unended: tuple[int, ...]


class OneRouter(RouterSide):
    """Owns the requests of one incarnation of a router. The boot id of a leg is its session here.

    doubted: sessions whose worker has refused a leg; no leg is bound there until the router has detected their end, as a
    replay pauses before it is sent again.
    """

    scenario: RoutersScenario

    def __init__(self, scenario: RoutersScenario, sink: Sink, boot: str) -> None:
        super().__init__(scenario, sink)
        self.boot = boot
        self.attached: dict[str, AttachedWorker] = {}
        self.holds: dict[int, CreditHold] = {}
        self.doubted: set[str] = set()
        for request in self.requests:
            if scenario.owners[request.number] != boot:
                request.ended = ELSEWHERE

    def carry_out(self) -> None:
        """Send the calls, and the answers to credits."""
        super().carry_out()
        for kind, session, number, attempt, num, _ in self.calls:
            self.sink.ask("call", kind, session, number, attempt, num)
        self.calls.clear()
        for worker in self.attached.values():
            while taken := worker.orders.take():
                message, _ = taken
                self.sink.ask("to_worker", worker.session, message.SerializeToString(deterministic=True))

    def open_session(self, session: str, worker: str, boot: str) -> None:
        """Attach a worker; see ``Registry.attach``. An older stream of the same process is lost."""
        if worker in self.workers:
            self.lose_session(self.workers[worker])
        registration = Registration(
            worker_id=worker, boot_id=boot, role=Role.AGGREGATED.value, max_model_len=_MAX_LENGTH
        )
        attached = AttachedWorker(
            registration, cast(WorkerCalls, None), OrderStream(worker, 10.0), Held(), ignore
        )
        attached.session, attached.latency, attached.capacity.held = session, WorkerLatency(no_time), None
        self.attached[worker] = attached
        self.attach(worker, session)

    def lose_session(self, session: str) -> None:
        """Take the end of a session; see ``AttachedWorker.lose``."""
        worker = self._worker_of(session)
        if worker is not None:
            del self.attached[worker]
            self.doubted.discard(session)
            self.lose(worker)

    def receive(self, session: str, frame: bytes) -> None:
        """Take a worker's message; see ``MembershipServicer._read``."""
        worker = self._worker_of(session)
        message = pb.WorkerMessage.FromString(frame)
        if worker is None:
            return
        if message.HasField("credit"):
            self.attached[worker].capacity.grant(credit_from_proto(message.credit))
            self.attached[worker].report_use()
        for entry in message.step.entries:
            one = output_from_proto(entry)
            tokens = tuple(one.token_ids)
            reason = one.finish_reason and str(one.finish_reason)
            self.hear(
                worker,
                session,
                (int(one.request_id), one.attempt, one.first_index, tokens, reason, one.error_kind),
            )

    def reject(self, session: str, number: int, attempt: int, kind: str) -> None:
        """Take the failure of a call that starts a leg; see ``bound_leg.Leg.reject``."""
        request = self.requests[number]
        leg = request.decode
        if leg is None or leg.boot != session or request.attempt != attempt or leg.has_spoken:
            return
        leg.may_hold = ErrorKind(kind) in _MAYBE_ACCEPTED
        self.doubted |= {session} if ErrorKind(kind) is ErrorKind.UNAVAILABLE else set()
        self._fail(request, ErrorKind(kind), {leg.worker})

    def look(self) -> RouterLook:
        """Return the part that the rules read."""
        workers = self.attached.values()
        bound = [(one.number, one.attempt, one.decode.boot) for one in self.requests if one.decode]
        return RouterLook(
            {worker.session: worker.capacity.num_requests for worker in workers},
            {worker.session: worker.capacity.credit.max_requests for worker in workers},
            frozenset(bound),
            tuple(one.number for one in self.requests if not one.ended),
        )

    def _worker_of(self, session: str) -> str | None:
        return next((name for name, known in self.workers.items() if known == session), None)

    def _view(self, worker: str) -> WorkerView:
        view = self.attached[worker].view()
        return replace(view, max_requests=0) if self.workers[worker] in self.doubted else view

    def _begin(self, request: RouterRequest, placement: Placement) -> None:
        super()._begin(request, placement)
        num_tokens = self.scenario.prompts[request.number] + self.scenario.answers[request.number]
        capacity = self.attached[placement.end].capacity
        self.holds[request.number] = capacity.hold("client", num_tokens)

    def _close(self, request: RouterRequest) -> None:
        super()._close(request)
        hold = self.holds.pop(request.number, None)
        if hold:
            hold.release()
