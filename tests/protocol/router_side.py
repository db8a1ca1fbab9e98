"""The router of the explored world: attempts, replays and the ladder, by production's policy, delivery and tables."""

from contract.errors import TRANSFER_KINDS, ErrorKind, error_from_kind
from contract.identity import Role
from contract.outputs import FinishReason
from router.attempts.failures import CURABLE, MAX_TRANSFER_FAILURES
from router.routing.legs import AGGREGATED, CONTINUATION, PREFILL, Placement, place_legs
from router.routing.policy import PlacementRequest, missing_role, place
from router.routing.views import WorkerView, WorkerViews
from router.tokens.delivery import Delivery, Token
from tests.protocol.engine_side import HANDED_OVER
from tests.protocol.router_request import Entry, LegCall, RouterLeg, RouterRequest
from tests.protocol.scenario import Scenario
from tests.protocol.sink import LawBrokenError, Sink


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
        """Begin attempts for which there is room now. Calls are kept until they are delivered."""
        self.bind_all()

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
        """Take one entry of a worker's stream; see ``router.attempts.attempt.Attempt._take``."""
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
        if leg is request.decode and tokens and not leg.has_spoken:
            request.num_moved += request.rungs[-1].startswith("moved")
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
        """Take a draining worker's credit; see ``router.migration.evacuation.Evacuation``."""
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

    def movable(self) -> list[int]:
        """Return the requests that may be moved now; see ``router.migration.migrator.Migrator.can_move``."""
        return [request.number for request in self.requests if self._may_be_moved(request)]

    def _may_be_moved(self, request: RouterRequest) -> bool:
        leg = request.decode
        is_decoding = leg is not None and leg.worker.startswith("P") and leg.has_spoken and leg.may_hold
        is_free = request.next_attempt is None and request.num_moves < self.scenario.num_moves
        return is_decoding and is_free and bool(self._target(request) or self._may_be_moved_without_room())

    def _may_be_moved_without_room(self) -> bool:
        is_attached = any(worker.startswith("D") for worker in self.workers)
        return is_attached and not self.scenario.rules.reserves_first

    def _target(self, request: RouterRequest) -> tuple[str, str] | None:
        """Return the worker and incarnation with room for the rest of a request's answer, or None."""
        wish = PlacementRequest(
            plan=CONTINUATION,
            num_prompt_tokens=self.scenario.prompts[request.number] + len(request.delivered),
            num_answer_tokens=self.scenario.answers[request.number],
            is_replay=True,
        )
        placement = place(self._views(), wish, request.number)
        return (placement.end, self.workers[placement.end]) if placement else None

    def move(self, number: int) -> None:
        """Reserve room for a request, and order it to be handed off; see ``Migrator._hand_off``."""
        request = self.requests[number]
        assert request.decode is not None
        if self.scenario.rules.reserves_first:
            request.target = self._target(request)
        request.num_moves += 1
        request.next_attempt = request.num_attempts
        request.num_attempts += 1
        self.calls.append(
            ("hand_off", request.decode.boot, number, request.attempt, request.next_attempt, None)
        )

    def refuse(self, number: int, attempt: int) -> None:
        """Take the refusal of an order to hand off; see ``router.migration.migration.Migration.refused``."""
        request = self.requests[number]
        if request.attempt == attempt:
            request.next_attempt = request.target = None

    def _hand_over(self, request: RouterRequest, leg: RouterLeg, num_tokens: int) -> None:
        """Continue at the target; see ``router.migration.migration.Migration.source_ended``."""
        target = request.target if self.scenario.rules.reserves_first else self._target(request)
        next_attempt = request.next_attempt
        is_known = len(request.delivered) == num_tokens
        if next_attempt is None or not is_known or not target or self.workers.get(target[0]) != target[1]:
            self._fail(request, ErrorKind.WORKER_LOST, {leg.worker})
            return
        request.next_attempt = request.target = None
        request.attempt = next_attempt
        request.delivery = Delivery(next_attempt, num_tokens)
        request.prefill = RouterLeg(leg.worker, leg.boot, num_tokens - 1)
        request.prefill.next_index = num_tokens
        self._continue_at(request, target)

    def silent_targets(self) -> list[int]:
        """Return the requests whose targets may be given up for their silence; see ``Move.target_is_silent``."""
        moved = [request for request in self.requests if request.decode and request.decode.may_hold]
        return [r.number for r in moved if r.decode and self._may_move_on(r, r.decode, ErrorKind.WORKER_LOST)]

    def give_up_target(self, number: int) -> None:
        """Continue at another target than the first one, which is silent: it may be alive."""
        request = self.requests[number]
        silent = request.decode
        assert silent is not None
        self._moves_on(request, silent, ErrorKind.WORKER_LOST)
        self.calls.append(("cancel", silent.boot, number, request.attempt, request.attempt, None))

    def _moves_on(self, request: RouterRequest, failed: RouterLeg, kind: ErrorKind) -> bool:
        """Continue at another target than the first one, which has failed; see ``Migration.target_failed``."""
        if not self._may_move_on(request, failed, kind):
            return False
        other = self._others(failed)[0]
        self._continue_at(request, (other, self.workers[other]))
        return True

    def _others(self, failed: RouterLeg) -> list[str]:
        return [name for name in self.workers if name.startswith("D") and name != failed.worker]

    def _may_move_on(self, request: RouterRequest, failed: RouterLeg, kind: ErrorKind) -> bool:
        source = request.prefill
        is_target = request.decode is failed and not failed.has_spoken
        is_moved = request.rungs[-1:] == [f"moved>{failed.worker}"] and "moved>" not in "".join(
            request.rungs[:-1]
        )
        if not is_target or not is_moved or source is None or kind not in CURABLE:
            return False
        return self.workers.get(source.worker) == source.boot and bool(self._others(failed))

    def _continue_at(self, request: RouterRequest, target: tuple[str, str]) -> None:
        """Order a worker to continue a request with what the source lends; see ``router.migration.migration.Migration``."""
        source = request.prefill
        assert source is not None
        request.decode = RouterLeg(*target, source.next_index)
        request.rungs.append(f"moved>{request.decode.worker}")
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
        views = self._views()
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
            placement = self._first_placement(request)
        if placement is not None:
            self._begin(request, placement)

    def _first_placement(self, request: RouterRequest) -> Placement | None:
        """Return where an answer begins that may be moved later."""
        return place_legs((AGGREGATED, f"P{request.number % self.scenario.num_prefill}"))

    def _views(self) -> WorkerViews:
        return WorkerViews.of(self._view(worker) for worker in sorted(self.workers))

    def _view(self, worker: str) -> WorkerView:
        if worker.startswith("P"):
            max_requests = 0 if worker in self.draining else 99
            return WorkerView(
                worker_id=worker, role=Role.PREFILL, max_requests=max_requests, max_tokens=10_000
            )
        return WorkerView(
            worker_id=worker,
            role=Role.DECODE,
            num_requests=self._num_bound(worker),
            max_requests=0 if worker in self.draining else self.scenario.decode_credit,
            max_tokens=10_000,
        )

    def _num_bound(self, worker: str) -> int:
        """Return how much of a decode worker's credit is held: by legs, and by moves that have not ended."""
        legs = [request.decode for request in self.requests if request.decode]
        targets = [request.target for request in self.requests if request.target]
        return sum(leg.worker == worker for leg in legs) + sum(name == worker for name, _ in targets)

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
        request.next_attempt = request.target = None

    def _fail(
        self, request: RouterRequest, kind: ErrorKind, failed_workers: set[str], *, is_known: bool = False
    ) -> None:
        """is_known: see ``router.attempts.failures.Failures``. Raises LawBrokenError if nothing can have failed."""
        if not self.scenario.faults:
            raise LawBrokenError(f"request {request.number} needs another attempt, and nothing has failed")
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
