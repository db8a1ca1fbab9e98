"""The workers and the queue of a simulated service. The router's policy chooses the workers of each request."""

from collections.abc import Callable
from dataclasses import dataclass

from autoscaler.timing_model import TimingModel
from benchmarks.simulation.timeline import Timeline
from benchmarks.simulation.worker import NoteSteps, SimulatedDecode, SimulatedPrefill, SimulatedRequest
from contract.identity import Role
from router.admission.fair_queue import FairQueue, QueueOrder
from router.routing.legs import CONTINUATION, DECODE, PREFILL, Placement
from router.routing.policy import PlacementRequest, place
from router.routing.views import WorkerView, WorkerViews

_LANE = "generation"
_QUEUED_PROMPT_TOKENS = 4096
"""Prompt tokens that a prefill worker takes at once."""
_MOST_LEGS = 256

Release = Callable[[], None]


@dataclass(eq=False)
class SimulatedWorker:
    """A worker. num_legs, num_tokens: bound legs of its present role, and their tokens; num_former: of former ones."""

    name: str
    role: Role
    prefill: SimulatedPrefill
    decode: SimulatedDecode
    num_legs: int = 0
    num_tokens: int = 0
    num_former: int = 0
    num_roles: int = 1
    is_draining: bool = False

    def hold(self, num_tokens: int) -> Release:
        """Count a leg. Returns the function that stops counting it, whatever role the worker has then."""
        number = self.num_roles
        self.num_legs += 1
        self.num_tokens += num_tokens

        def release() -> None:
            if number == self.num_roles:
                self.num_legs -= 1
                self.num_tokens -= num_tokens
            else:
                self.num_former -= 1

        return release

    def set_role(self, role: Role) -> None:
        """Count legs of another role from now on."""
        self.num_former += self.num_legs
        self.num_legs = 0
        self.num_tokens = 0
        self.num_roles += 1
        self.role = role

    @property
    def is_empty(self) -> bool:
        """True if no leg is bound."""
        return not self.num_legs and not self.num_former


@dataclass(frozen=True)
class Listeners:
    """The functions that a pool calls.

    first_token, done: with each request at its first and after its last token. empty: with a draining worker that holds no
    leg any more. prompts: with the seconds that a prompt has taken, and its tokens. steps: see ``NoteSteps``.
    """

    first_token: Callable[[SimulatedRequest], None]
    done: Callable[[SimulatedRequest], None]
    empty: Callable[[SimulatedWorker], None]
    prompts: Callable[[float, int], None]
    steps: NoteSteps


class SimulatedPool:
    """Owns the workers and the queue. workers: those that are attached, by name."""

    def __init__(self, timeline: Timeline, timing: TimingModel, listeners: Listeners) -> None:
        self.workers: dict[str, SimulatedWorker] = {}
        self._timeline = timeline
        self._timing = timing
        self._listeners = listeners
        self._queue: FairQueue[str, SimulatedRequest] = FairQueue()
        self._views = WorkerViews()
        self._prompts: dict[SimulatedRequest, tuple[SimulatedWorker, Release]] = {}
        self._answers: dict[SimulatedRequest, tuple[SimulatedWorker, Release]] = {}
        self._turn = 0

    @property
    def num_waiting(self) -> int:
        """The requests without workers."""
        return len(self._queue)

    @property
    def oldest_wait(self) -> float:
        """The seconds for which the oldest of them has waited."""
        head = self._queue.head(_LANE)
        return self._timeline.now - head.order.arrival if head else 0.0

    def arrive(self, request: SimulatedRequest) -> None:
        """Queue a request, and admit what has room."""
        order = QueueOrder(arrival=request.arrival.time, cost=float(request.arrival.prompt_tokens))
        self._queue.add(_LANE, order, request)
        self._admit()

    def add(self, name: str, role: Role) -> None:
        """Attach a worker that is ready."""
        prefill = SimulatedPrefill(
            self._timeline, self._timing, self._on_first_token, self._listeners.prompts
        )
        decode = SimulatedDecode(self._timeline, self._timing, self._on_last_token, self._listeners.steps)
        worker = self.workers[name] = SimulatedWorker(name, role, prefill, decode)
        self._update(worker)
        self._admit()

    def drain(self, name: str) -> None:
        """Bind nothing more to a worker. Its answers move to other workers that have room for them."""
        worker = self.workers[name]
        worker.is_draining = True
        self._update(worker)
        self._move_answers(worker)

    def keep(self, name: str) -> None:
        """Let a draining worker serve again."""
        worker = self.workers[name]
        worker.is_draining = False
        self._update(worker)
        self._admit()

    def flip(self, name: str, role: Role) -> None:
        """Let a worker take another role. It ends the prompts that it has; its answers move away."""
        worker = self.workers[name]
        worker.set_role(role)
        self._update(worker)
        self._move_answers(worker)
        self._admit()

    def _admit(self) -> None:
        """Admit requests in their order for as long as there is room."""
        while (entry := self._queue.head(_LANE)) is not None:
            arrival = entry.item.arrival
            wish = PlacementRequest(
                num_prompt_tokens=arrival.prompt_tokens, num_answer_tokens=arrival.answer_tokens
            )
            if (placement := place(self._views, wish, self._turn)) is None:
                return
            self._turn += 1
            self._queue.admit(entry)
            self._begin(entry.item, placement)

    def _begin(self, request: SimulatedRequest, placement: Placement) -> None:
        workers = {leg.kind: self.workers[leg.worker] for leg in placement.legs}
        sender = workers[PREFILL]
        arrival = request.arrival
        self._prompts[request] = (sender, sender.hold(arrival.prompt_tokens))
        self._update(sender)
        self._bind_answer(request, workers[DECODE])
        sender.prefill.add(request)

    def _bind_answer(self, request: SimulatedRequest, worker: SimulatedWorker) -> None:
        release = worker.hold(request.arrival.prompt_tokens + request.arrival.answer_tokens)
        self._answers[request] = (worker, release)
        self._update(worker)

    def _on_first_token(self, request: SimulatedRequest) -> None:
        request.first_token = self._timeline.now
        request.num_left = float(request.arrival.answer_tokens - 1)
        self._listeners.first_token(request)
        self._release(self._prompts, request)
        if not request.num_left:
            self._on_last_token(request)
            return
        seconds = self._timing.transfer.seconds(request.arrival.prompt_tokens)
        self._timeline.after(seconds, lambda: self._answers[request][0].decode.add(request))
        self._admit()

    def _on_last_token(self, request: SimulatedRequest) -> None:
        request.finished = self._timeline.now
        self._listeners.done(request)
        self._release(self._answers, request)
        self._admit()

    def _release(
        self, held: dict[SimulatedRequest, tuple[SimulatedWorker, Release]], request: SimulatedRequest
    ) -> None:
        worker, release = held.pop(request)
        release()
        self._update(worker)

    def _move_answers(self, worker: SimulatedWorker) -> None:
        """Move the answers that a worker decodes. Those without room elsewhere stay; those in transfer follow their KV."""
        for request in worker.decode.remove_all():
            wish = PlacementRequest(
                num_prompt_tokens=request.arrival.prompt_tokens,
                num_answer_tokens=request.arrival.answer_tokens,
                plan=CONTINUATION,
            )
            placement = place(self._views, wish, self._turn)
            if placement is not None:
                self._turn += 1
                self._release(self._answers, request)
                self._bind_answer(request, self.workers[placement.end])
            self._answers[request][0].decode.add(request)

    def _update(self, worker: SimulatedWorker) -> None:
        """Replace the view of a worker, or detach it if it drains and is empty."""
        if worker.name not in self.workers:
            return
        if worker.is_draining and worker.is_empty:
            del self.workers[worker.name]
            self._views.remove(worker.name)
            self._listeners.empty(worker)
            return
        serves = 0 if worker.is_draining else 1
        is_prefill = worker.role is Role.PREFILL
        max_legs = _MOST_LEGS if is_prefill else self._timing.max_answers
        max_tokens = _QUEUED_PROMPT_TOKENS if is_prefill else self._timing.kv_tokens
        self._views.put(
            WorkerView(
                worker_id=worker.name,
                role=worker.role,
                num_requests=worker.num_legs,
                num_tokens=worker.num_tokens,
                max_requests=serves * max_legs,
                max_tokens=serves * max_tokens,
                num_running=worker.decode.num_answers,
                pool_tokens=self._timing.kv_tokens,
            )
        )
