"""One of several routers: production's credit, views, policy and delivery, and the attempts of ``RouterSide``."""

from typing import NamedTuple, cast

from contract.errors import ErrorKind
from contract.identity import Role
from contract.membership import Credit, Registration
from protos import worker_pb2 as pb
from router.routing.legs import Placement
from router.routing.running_shares import Held
from router.routing.views import WorkerView
from router.workers.attached_worker import AttachedWorker, WorkerLatency
from router.workers.capacity import CreditHold
from router.workers.order_stream import OrderStream
from router.workers.worker_calls import WorkerCalls
from tests.protocol.engine_side import HANDED_OVER, no_time
from tests.protocol.router_request import RouterRequest
from tests.protocol.router_side import RouterSide
from tests.protocol.routers.scenario import RoutersScenario
from tests.protocol.routers.worker_side import ignore
from tests.protocol.routers.world import Call, Order
from tests.protocol.sink import Sink
from wire.messages import from_proto
from wire.tokens import output_from_proto

ELSEWHERE = "another router's"
_MAX_LENGTH = 64


class RouterLook(NamedTuple):
    """The part of a router's state that the rules of the world read.

    held: legs that are bound, by session. limits: its credit, by session. bound: (request, attempt, session) of each leg.
    movable: requests that may be moved now.
    """

    held: dict[str, int]
    limits: dict[str, int]
    bound: frozenset[tuple[int, int, str | None]]
    unended: tuple[int, ...]
    movable: tuple[int, ...]


class OneRouter(RouterSide):
    """Owns the requests of one incarnation of a router. The boot id of a leg is its session here."""

    scenario: RoutersScenario

    def __init__(self, scenario: RoutersScenario, sink: Sink, boot: str) -> None:
        super().__init__(scenario, sink)
        self.boot = boot
        self.attached: dict[str, AttachedWorker] = {}
        self.holds: dict[tuple[int, str], CreditHold] = {}
        for request in self.requests:
            if scenario.owners[request.number] != boot:
                request.ended = ELSEWHERE

    def carry_out(self) -> None:
        """Send the orders and calls, and the answers to credits."""
        for request in self.requests:
            self.hold_credit(request)
        for worker in self.attached.values():
            former = worker.capacity.former
            num_moves = former.num_moves
            former.num_moves = self.num_moves_from(worker)
            if former.num_moves < num_moves and not former.num_left:
                worker.report_use()
        super().carry_out()
        for kind, session, number, attempt, num, source in self.calls:
            if kind == "hand_off":
                self.sink.ask("call", Call(session, number, attempt, num))
            else:
                lender = boot_of(source) if source else ""
                num_delivered = 0 if kind == "cancel" else num
                self.sink.ask("order", session, Order(kind, number, attempt, num_delivered, lender))
        self.calls.clear()
        for worker in self.attached.values():
            while taken := worker.orders.next_message():
                message, _ = taken
                self.sink.ask("to_worker", worker.session, message.SerializeToString(deterministic=True))

    def role_of(self, worker: str) -> Role:
        """Return the role in which a worker registers."""
        return Role.AGGREGATED

    def open_session(self, session: str, worker: str, boot: str) -> None:
        """Attach a worker; see ``Registry.attach``. An older stream of the same process is lost."""
        if worker in self.workers:
            self.lose_session(self.workers[worker])
        registration = Registration(
            worker_id=worker, boot_id=boot, role=self.role_of(worker).value, max_model_len=_MAX_LENGTH
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
            self.lose(worker)

    def receive(self, session: str, frame: bytes) -> None:
        """Take a worker's message; see ``MembershipServicer._read``."""
        worker = self._worker_of(session)
        message = pb.WorkerMessage.FromString(frame)
        if worker is None:
            return
        if message.HasField("credit"):
            self.take_credit(worker, from_proto(Credit, message.credit))
        for entry in message.step.entries:
            one = output_from_proto(entry)
            if one.is_rejected:
                self.reject(session, int(one.request_id), one.attempt, str(one.error_kind))
                continue
            tokens = tuple(one.token_ids)
            reason = HANDED_OVER if one.handed_over else one.finish_reason and str(one.finish_reason)
            self.hear(
                worker,
                session,
                (int(one.request_id), one.attempt, one.first_index, tokens, reason, one.error_kind),
            )

    def take_credit(self, worker: str, credit: Credit) -> None:
        """Take a credit, and answer it."""
        self.attached[worker].capacity.grant(credit)
        self.attached[worker].report_use()

    def reject(self, session: str, number: int, attempt: int, kind: str) -> None:
        """Take the rejection of a leg, by its worker or since it is late; see ``bound_leg.Leg.reject``."""
        request = self.requests[number]
        leg = next((each for each in request.legs if each.boot == session), None)
        if leg is None or request.attempt != attempt or leg.has_spoken:
            return
        leg.may_hold = ErrorKind(kind) is ErrorKind.DEADLINE
        if not self._moves_on(request, leg, ErrorKind(kind)):
            self._fail(request, ErrorKind(kind), {leg.worker})

    def look(self) -> RouterLook:
        """Return the part that the rules read."""
        workers = self.attached.values()
        bound = [(one.number, one.attempt, leg.boot) for one in self.requests for leg in one.legs]
        return RouterLook(
            {worker.session: worker.capacity.num_requests for worker in workers},
            {worker.session: worker.capacity.credit.max_requests for worker in workers},
            frozenset(bound),
            tuple(one.number for one in self.requests if not one.ended),
            tuple(self.movable()),
        )

    def num_moves_from(self, source: AttachedWorker) -> int:
        """Return how many answers are being moved away from a worker; see ``FormerWork.moving``."""
        return 0

    def _worker_of(self, session: str) -> str | None:
        return next((name for name, known in self.workers.items() if known == session), None)

    def _view(self, worker: str) -> WorkerView:
        return self.attached[worker].view()

    def _begin(self, request: RouterRequest, placement: Placement) -> None:
        super()._begin(request, placement)
        self.hold_credit(request)

    def _close(self, request: RouterRequest) -> None:
        super()._close(request)
        self.hold_credit(request)

    def hold_credit(self, request: RouterRequest) -> None:
        """Hold the credit of each leg of a request, and of the room that is reserved for its move, and of nothing else."""
        wanted = {leg.boot: leg.worker for leg in request.legs}
        if request.target:
            wanted[request.target[1]] = request.target[0]
        for key in [key for key in self.holds if key[0] == request.number and key[1] not in wanted]:
            self.holds.pop(key).release()
        num_tokens = self.scenario.prompts[request.number] + self.scenario.answers[request.number]
        for session, worker in wanted.items():
            if (request.number, session) not in self.holds:
                capacity = self.attached[worker].capacity
                self.holds[request.number, session] = capacity.hold("client", num_tokens)


def boot_of(session: str) -> str:
    """Return the incarnation of the worker of a session."""
    return session.partition(">")[2].partition("/")[0]
