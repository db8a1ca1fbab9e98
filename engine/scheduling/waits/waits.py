"""Wait stages: what requests wait for before they run, like a compiled grammar or KV that another worker computes.

A request enters every stage that it needs when it is added, and leaves each one when what it waited for is there. Its
status and its deadline are those of the first stage, in order, that it has not left. A request that has left all
of them is ready for the batch.
"""

import heapq
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from engine.scheduling.requests.finish import Finish, RequestStatus
from engine.scheduling.requests.request import Request


@dataclass(frozen=True, order=True)
class Deadline:
    """A time (seconds of the monotonic clock) by which the request ``key`` must have left the wait stage named ``stage``.

    stage: None for the deadline of the request's whole life. seconds: how long it was given, for the message.
    """

    when: float
    key: str = field(compare=False)
    seconds: float = field(compare=False)
    stage: str | None = field(default=None, compare=False)


class Deadlines:
    """A heap of the deadlines of live requests; those of forgotten requests are dropped when they come to its top.

    clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[Deadline, int]] = []
        self._lives: dict[str, int] = {}
        self._life_numbers = itertools.count()

    def add(self, deadline: Deadline) -> None:
        """Add a deadline; its request is live until ``forget``. A key that lives again has new deadlines only."""
        # A number, since a later request may have the key of one whose deadlines are still in the heap.
        life = self._lives.setdefault(deadline.key, next(self._life_numbers))
        heapq.heappush(self._heap, (deadline, life))

    def start(self, key: str, seconds: float, stage: str) -> Deadline:
        """Add the deadline of a request that has entered a wait stage now, and return it."""
        deadline = Deadline(self._clock() + seconds, key, seconds, stage)
        self.add(deadline)
        return deadline

    def forget(self, key: str) -> None:
        """Drop the deadlines of a request that has finished."""
        self._lives.pop(key, None)
        # Otherwise long deadlines of requests that ended soon would fill the heap.
        if len(self._heap) > 4 * len(self._lives) + 64:
            self._heap = [entry for entry in self._heap if self._is_live(*entry)]
            heapq.heapify(self._heap)

    def pop_expired(self) -> list[Deadline]:
        """Return the deadlines of live requests that are due, earliest first, once each."""
        expired = []
        now = self._clock()
        while self._heap and self._heap[0][0].when <= now:
            deadline, life = heapq.heappop(self._heap)
            if self._is_live(deadline, life):
                expired.append(deadline)
        return expired

    def next(self) -> float | None:
        """Return when the earliest deadline of a live request is due."""
        while self._heap and not self._is_live(*self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0].when if self._heap else None

    def is_due(self) -> bool:
        """Return whether ``pop_expired`` would return something."""
        if not self._heap or self._heap[0][0].when > self._clock():  # the usual case, in every step
            return False
        due = self.next()
        return due is not None and due <= self._clock()

    def _is_live(self, deadline: Deadline, life: int) -> bool:
        return self._lives.get(deadline.key) == life


@dataclass(frozen=True)
class Ready:
    """A request whose wait in a stage is over. finish: how it finishes, if it does; then it is still in the stage."""

    request: Request
    finish: Finish | None = None


class WaitStage(Protocol):
    """One thing that requests wait for. Used from the step thread.

    A stage keeps its own records of the requests that wait in it, and learns of each one that ends. ``Waits`` calls it as
    follows; ``Grammars`` and ``decode_service.kv_receiver.KVReceiver`` are stages::

        if stage.needs_wait(request):
            stage.start(request)            # its status is ``stage.status`` now, for ``timeout_seconds`` at most
        ...
        if stage.has_pending:               # asked before each step: what the request waited for is there
            for ready in stage.pop_ready():
                ...                         # it goes on, or ends with ``ready.finish``
        stage.give_up(request)              # instead, if it is aborted; at the time limit ``overdue`` gives the error

    """

    @property
    def name(self) -> str:
        """The stage's own name."""

    @property
    def status(self) -> RequestStatus:
        """The status of a request while this is the first stage that it has not left."""

    @property
    def timeout_seconds(self) -> float:
        """The time for which a request may have that status."""

    @property
    def has_pending(self) -> bool:
        """True while ``pop_ready`` would return something."""

    def needs_wait(self, request: Request) -> bool:
        """Return whether this new request has to wait here."""

    def start(self, request: Request) -> None:
        """Start the wait of a request. Raises a KvbatonError to reject it; then nothing has changed."""

    def pop_ready(self) -> Sequence[Ready]:
        """Return the requests whose wait is over, once each; those that did not fail have left the stage."""

    def give_up(self, request: Request) -> bool:
        """End the wait of a request that finishes; return whether this freed its blocks, or quarantined them."""

    def overdue(self, request: Request, seconds: float) -> Finish | None:
        """Return how a request finishes that has had this stage's status for ``seconds``.

        None if it goes on without what it waited for: ``pop_ready`` returns it.
        """

    def check_integrity(self, requests: Mapping[str, Request]) -> None:
        """Assert that the stage's own records match the live requests, by key."""


class Waits:
    """Owns which stages each request has not left, and their deadlines."""

    def __init__(self, stages: Sequence[WaitStage], deadlines: Deadlines) -> None:
        self._stages = list(stages)
        self._deadlines = deadlines
        self._pending: dict[str, list[WaitStage]] = {}
        self._ends: dict[str, Deadline] = {}  # of the stage whose status the request has

    @property
    def keys(self) -> Collection[str]:
        """Keys of the requests that wait."""
        return self._pending.keys()

    @property
    def has_pending(self) -> bool:
        """True while ``pop_ready`` would return something."""
        # A loop, because this is asked twice in each step: a generator would be called for every stage.
        for stage in self._stages:  # noqa: SIM110
            if stage.has_pending:
                return True
        return False

    def start(self, request: Request) -> bool:
        """Enter the stages that a request needs, all or none; return whether it needs any. Raises what a stage raises."""
        needed = [stage for stage in self._stages if stage.needs_wait(request)]
        # If one stage rejects the request, those before it must forget it.
        with ExitStack() as undo:
            for stage in needed:
                stage.start(request)
                undo.callback(stage.give_up, request)
            undo.pop_all()
        if needed:
            self._pending[request.key] = needed
            self._enter_first(request)
        return bool(needed)

    def enter(self, request: Request, stage: WaitStage) -> None:
        """Let a request wait that was queued until now; it has begun to wait in this stage."""
        self._pending[request.key] = [stage]
        self._enter_first(request)

    def pop_ready(self) -> Iterator[Ready]:
        """Yield the requests that have left their last stage, and those that failed.

        The caller finishes each failed one before it takes the next.
        """
        for stage in self._stages:
            for ready in stage.pop_ready():
                if ready.finish is not None or self._leave(ready.request, stage):
                    yield ready

    def give_up(self, request: Request) -> bool:
        """End the waits of a request that finishes; return whether a stage has freed its blocks, or quarantined them."""
        # Not within any(): every stage has to give up, even if the first one has freed the blocks.
        returned = [stage.give_up(request) for stage in self._pending.pop(request.key, ())]
        self._ends.pop(request.key, None)
        return any(returned)

    def overdue(self, request: Request, deadline: Deadline) -> Finish | None:
        """Return how a request finishes at the deadline of a stage; None if it has left the stage, or goes on."""
        # One of an earlier wait is still in the heap: a request may load its blocks from a tier several times.
        if self._ends.get(request.key) is not deadline:
            return None
        return self._pending[request.key][0].overdue(request, deadline.seconds)

    def check_integrity(self, requests: Mapping[str, Request]) -> None:
        """Assert that each request that waits is live, and has the status and a deadline of its first stage."""
        assert self._ends.keys() == self._pending.keys()
        for key, stages in self._pending.items():
            assert stages and requests[key].status is stages[0].status
        for stage in self._stages:
            stage.check_integrity(requests)

    def _leave(self, request: Request, stage: WaitStage) -> bool:
        """Remove a request from a stage; return whether that was its last one."""
        stages = self._pending[request.key]
        is_first = stages[0] is stage  # status and deadline are those of the first one that is left
        stages.remove(stage)
        if not stages:
            del self._pending[request.key]
            del self._ends[request.key]
            # One that has run before is resumed: the runner still keeps it.
            is_new = not request.is_known_to_runner
            request.status = RequestStatus.WAITING if is_new else RequestStatus.PREEMPTED
        elif is_first:
            self._enter_first(request)
        return not stages

    def _enter_first(self, request: Request) -> None:
        stage = self._pending[request.key][0]
        request.status = stage.status
        self._ends[request.key] = self._deadlines.start(request.key, stage.timeout_seconds, stage.name)
