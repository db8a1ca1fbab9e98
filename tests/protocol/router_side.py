"""The router of the explored world: attempts, replays and the ladder, by production's policy, delivery and tables."""

from contract.errors import ErrorKind, error_from_kind
from contract.identity import Role
from contract.outputs import FinishReason
from router.delivery import Delivery, Token
from router.failures import CURABLE, MAX_TRANSFER_FAILURES, TRANSFER_KINDS
from router.legs import AGGREGATED, PREFILL, Placement, placed
from router.policy import PlacementRequest, missing_role, place
from router.views import WorkerView, WorkerViews
from tests.protocol.engine_side import HANDED_OVER
from tests.protocol.scenario import Scenario
from tests.protocol.sink import LawBrokenError, Sink

TARGET = "D0"
"""The worker to which requests are moved."""
SECOND_TARGET = "D1"
"""The one that continues them if TARGET fails."""
Entry = tuple[int, int, int, tuple[int, ...], str | None, str | None]
"""(request, attempt, first index, tokens, finish reason, error kind)."""
LegCall = tuple[str, str, int, int, int, str | None]
"""(prefill, decode, cancel or hand_off; the worker's boot id; request; attempt; tokens delivered before; the sender's boot
id). In place of the tokens, a cancel has the attempt that was started there, and a hand-off the next attempt."""


class RouterLeg:
    """One worker's part of an attempt; see ``router.attempt.Leg``."""

    def __init__(self, worker: str, boot: str, first_index: int) -> None:
        self.worker, self.boot, self.first_index = worker, boot, first_index
        self.next_index = first_index
        self.may_hold = True

    @property
    def has_spoken(self) -> bool:
        return self.next_index > self.first_index

    @property
    def is_over(self) -> bool:
        return not self.may_hold and self.has_spoken


class RouterRequest:
    """One request's life; see ``router.request_run.RequestRun``. ended: how, once it has; it never changes then."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.delivered: list[int] = []
        self.num_attempts = self.num_failures = self.num_transfer_failures = 0
        self.failed_workers: set[str] = set()
        self.prefer: str | None = None
        self.attempt = -1
        self.delivery = Delivery()
        self.prefill: RouterLeg | None = None
        self.decode: RouterLeg | None = None
        self.num_moves = 0
        self.next_attempt: int | None = None
        self.rungs: list[str] = []
        self.ended: str | None = None

    @property
    def legs(self) -> list[RouterLeg]:
        return [leg for leg in (self.prefill, self.decode) if leg]

    @property
    def is_bound(self) -> bool:
        return self.decode is not None


class RouterSide:
    """Owns every request until it ends.

    workers: those that are attached, by name. calls: on their way to workers. draining: the workers that drain, each with
    whether its legs have begun again elsewhere.
    """

    def __init__(self, scenario: Scenario, sink: Sink) -> None:
        self.scenario, self.sink = scenario, sink
        self.requests = [RouterRequest(number) for number in range(len(scenario.prompts))]
        self.workers = {f"P{index}": f"P{index}.1" for index in range(scenario.num_prefill)}
        self.workers |= {f"D{index}": f"D{index}.1" for index in range(scenario.num_decode)}
        self.calls: list[LegCall] = []
        self.draining: dict[str, bool] = {}
        self.bind_all()

    def prepare(self) -> None:
        """Do nothing."""

    def carry_out(self) -> None:
        """Keep calls until they are delivered."""

    def tidy(self) -> None:
        """Sort the calls: their order between different workers means nothing."""
        self.calls.sort(key=lambda call: (call[1], call[2], call[3], call[0] == "cancel"))
        self.workers = dict(sorted(self.workers.items()))
        self.draining = dict(sorted(self.draining.items()))
        for request in self.requests:
            if request.ended and (request.legs or request.delivered):
                raise LawBrokenError(f"request {request.number} has ended, and goes on")

    def bind_all(self) -> None:
        """Begin an attempt of every request that has none, if there are workers for it."""
        for request in self.requests:
            if not request.ended and not request.is_bound:
                self._bind(request)

    def deliver(self, index: int) -> None:
        """Remove a call that has arrived at its worker (or whose worker is gone)."""
        self.calls.pop(index)

    def cares(self, boot: str, entry: Entry) -> bool:
        """Return whether the entry is of the running attempt; other entries are dropped, now and later."""
        request = self.requests[entry[0]]
        return entry[1] == request.attempt and any(
            leg.boot == boot and not leg.is_over for leg in request.legs
        )

    def hear(self, worker: str, boot: str, entry: Entry) -> None:
        """Take one entry of a worker's stream; see ``router.attempt.Attempt._take``."""
        number, attempt, first_index, tokens, finish_reason, error_kind = entry
        request = self.requests[number]
        leg = next((leg for leg in request.legs if (leg.worker, leg.boot) == (worker, boot)), None)
        if leg is None or attempt != request.attempt or leg.is_over:
            return
        if finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            leg.may_hold = False
            failed_workers = {each.worker for each in request.legs if each.may_hold or each is leg}
            is_abort = finish_reason == FinishReason.ABORT or error_kind is None
            kind = ErrorKind.WORKER_LOST if is_abort else ErrorKind(str(error_kind))
            if not self._moves_on(request, leg, kind):
                self._fail(request, kind, failed_workers)
            return
        if finish_reason == HANDED_OVER:
            self._hand_over(request, leg, first_index)
            return
        if tokens and first_index > leg.next_index:
            self._fail(request, ErrorKind.WORKER_LOST, {worker})
            return
        leg.next_index = max(leg.next_index, first_index + len(tokens))
        if finish_reason:
            request.delivery.end = leg.next_index
            leg.may_hold = False
        if leg is request.decode and tokens and request.prefill:
            request.prefill.may_hold = False
        due = request.delivery.accept(
            attempt, [Token(first_index + i, token) for i, token in enumerate(tokens)]
        )
        self._deliver(request, [token.token_id for token in due])

    def lose(self, worker: str) -> None:
        """Close the worker's stream; see ``AttachedWorker.gone``."""
        boot = self.workers.pop(worker)
        self.draining.pop(worker, None)
        for request in self.requests:
            lost = next((leg for leg in request.legs if (leg.worker, leg.boot) == (worker, boot)), None)
            if lost is not None and not lost.is_over:
                lost.may_hold = False
                if self._moves_on(request, lost, ErrorKind.WORKER_LOST):
                    continue
                is_known = worker in request.failed_workers
                self._fail(request, ErrorKind.WORKER_LOST, {worker}, is_known=is_known)

    def drain(self, worker: str) -> None:
        """Take a draining worker's credit; see ``router.evacuation.Evacuation``."""
        self.draining[worker] = False
        if any(other[0] == worker[0] and other not in self.draining for other in self.workers):
            for request in self.requests:
                if request.decode and request.decode.worker == worker and not request.decode.has_spoken:
                    self._move(request)

    def has_legs(self, worker: str) -> bool:
        """Return whether a leg is bound to the worker."""
        return any(
            leg.worker == worker and not leg.is_over for request in self.requests for leg in request.legs
        )

    def move_legs(self, worker: str) -> None:
        """Begin the legs that are left at a worker's deadline again elsewhere; see ``Evacuation.move_legs``."""
        self.draining[worker] = True
        for request in self.requests:
            if any(leg.worker == worker and not leg.is_over for leg in request.legs):
                self._move(request)

    def _move(self, request: RouterRequest) -> None:
        self._fail(request, ErrorKind.WORKER_LOST, set(), is_known=True)

    def attach(self, worker: str, boot: str) -> None:
        """Register a worker."""
        self.workers[worker] = boot
        for request in self.requests:
            request.failed_workers.discard(worker)
        self.bind_all()

    def can_be_moved(self, request: RouterRequest) -> bool:
        """Return whether a request may be moved now; see ``router.moving.Mover.can_move``."""
        leg = request.decode
        is_decoding = leg is not None and leg.worker.startswith("P") and leg.has_spoken and leg.may_hold
        is_free = request.next_attempt is None and request.num_moves < self.scenario.num_moves
        return is_decoding and is_free and TARGET in self.workers

    def move(self, number: int) -> None:
        """Order a request to be handed off; see ``router.move.Move.begin``."""
        request = self.requests[number]
        assert request.decode is not None
        request.num_moves += 1
        request.next_attempt = request.num_attempts
        request.num_attempts += 1
        self.calls.append(
            ("hand_off", request.decode.boot, number, request.attempt, request.next_attempt, None)
        )

    def refuse(self, number: int, attempt: int) -> None:
        """Take the refusal of an order to hand off; see ``router.move.Move.refused``."""
        request = self.requests[number]
        if request.attempt == attempt:
            request.next_attempt = None

    def _hand_over(self, request: RouterRequest, leg: RouterLeg, num_tokens: int) -> None:
        """Continue at the target; see ``router.move.Move.handed_over``."""
        next_attempt = request.next_attempt
        if next_attempt is None or len(request.delivered) != num_tokens or TARGET not in self.workers:
            self._fail(request, ErrorKind.WORKER_LOST, {leg.worker})
            return
        request.next_attempt = None
        request.attempt = next_attempt
        request.delivery = Delivery(next_attempt, num_tokens)
        request.prefill = RouterLeg(leg.worker, leg.boot, num_tokens - 1)
        request.prefill.next_index = num_tokens
        self._continue_at(request, TARGET)

    def _moves_on(self, request: RouterRequest, failed: RouterLeg, kind: ErrorKind) -> bool:
        """Continue at another target than the first one, which has failed; see ``router.move.Move.target_failed``."""
        source = request.prefill
        is_target = request.decode is failed and failed.worker == TARGET and not failed.has_spoken
        is_moved = bool(request.rungs) and request.rungs[-1] == f"moved>{TARGET}"
        if not is_target or not is_moved or source is None or kind not in CURABLE:
            return False
        if self.workers.get(source.worker) != source.boot or SECOND_TARGET not in self.workers:
            return False
        self._continue_at(request, SECOND_TARGET)
        return True

    def _continue_at(self, request: RouterRequest, target: str) -> None:
        """Order a worker to continue a request with what the source lends; see ``router.move.Move``."""
        source = request.prefill
        assert source is not None
        request.decode = RouterLeg(target, self.workers[target], source.next_index)
        request.rungs.append(f"moved>{target}")
        call = ("decode", request.decode.boot, request.number, request.attempt, source.next_index - 1)
        self.calls.append((*call, source.boot))

    def give_up(self, number: int, kind: str) -> None:
        """End a request: the client has gone, or a deadline is over."""
        self._end(self.requests[number], kind)

    def doubt(self, number: int) -> None:
        """Replace an attempt that takes too long."""
        request = self.requests[number]
        self._fail(request, ErrorKind.DEADLINE, {leg.worker for leg in request.legs})

    def _deliver(self, request: RouterRequest, tokens: list[int]) -> None:
        for token in tokens:
            number, position = request.number, self.scenario.prompts[request.number] + len(request.delivered)
            if token != self.scenario.token(number, position):
                raise LawBrokenError(f"wrong text: request {number} got token {token} at position {position}")
            request.delivered.append(token)
        if tokens and request.decode and request.decode.has_spoken:
            request.num_failures = request.num_transfer_failures = 0
        if request.delivery.is_complete:
            if len(request.delivered) != self.scenario.answers[request.number]:
                raise LawBrokenError(f"wrong text: request {request.number} ended early")
            self._end(request, "answered")

    def _bind(self, request: RouterRequest) -> None:
        views = WorkerViews.of(self._view(worker) for worker in sorted(self.workers))
        wish = PlacementRequest(
            num_prompt_tokens=self.scenario.prompts[request.number] + len(request.delivered),
            num_answer_tokens=self.scenario.answers[request.number],
            num_delivered=len(request.delivered),
            prefer=request.prefer,
            avoid=frozenset(request.failed_workers),
            is_replay=request.num_attempts > 0,
            is_local=request.num_transfer_failures >= MAX_TRANSFER_FAILURES,
        )
        if missing_role(views.sizes, wish.least_plan):
            return
        placement = place(views, wish, request.number)
        if self.scenario.num_moves and request.num_attempts == 0:
            placement = placed((AGGREGATED, "P0"))
        if placement is not None:
            self._begin(request, placement)

    def _view(self, worker: str) -> WorkerView:
        role = Role.PREFILL if worker.startswith("P") else Role.DECODE
        max_requests = 0 if worker in self.draining else 99
        return WorkerView(worker_id=worker, role=role, max_requests=max_requests, max_tokens=10_000)

    def _begin(self, request: RouterRequest, placement: Placement) -> None:
        request.attempt = request.num_attempts if self.scenario.rules.tells_attempts_apart else 0
        request.num_attempts += 1
        first = len(request.delivered)
        request.delivery = Delivery(request.attempt, first)
        *before, end = [
            RouterLeg(leg.worker, self.workers[leg.worker], leg.first_index) for leg in placement.legs
        ]
        request.prefill = before[0] if before else None
        request.decode = end
        request.rungs.append(f"{placement.worker_of(PREFILL) or 'local'}>{placement.end}")
        source = request.prefill.boot if request.prefill else None
        for kind, leg in (("prefill", request.prefill), ("decode", request.decode)):
            if leg is not None:
                self.calls.append((kind, leg.boot, request.number, request.attempt, first, source))

    def _close(self, request: RouterRequest) -> None:
        for leg in request.legs:
            if leg.may_hold and self.workers.get(leg.worker) == leg.boot:
                attempt = request.attempt
                if request.next_attempt is not None and self.scenario.rules.names_next_attempt:
                    attempt = request.next_attempt
                self.calls.append(("cancel", leg.boot, request.number, attempt, request.attempt, None))
        request.prefill = request.decode = None
        request.next_attempt = None

    def _fail(
        self, request: RouterRequest, kind: ErrorKind, failed_workers: set[str], *, is_known: bool = False
    ) -> None:
        """is_known: see ``router.failures.Failures``."""
        prefer = request.prefill.worker if request.prefill else None
        self._close(request)
        request.num_failures += not is_known
        request.num_transfer_failures += kind in TRANSFER_KINDS and not is_known
        if kind not in CURABLE or request.num_failures > self.scenario.max_replays:
            self._end(request, f"error {error_from_kind(kind, '').kind}")
            return
        request.failed_workers |= {worker for worker in failed_workers if worker in self.workers}
        request.prefer = prefer
        self._bind(request)

    def _end(self, request: RouterRequest, how: str) -> None:
        if request.ended:
            raise LawBrokenError(f"request {request.number} ended twice")
        self._close(request)
        request.ended = how
        request.delivered = []
