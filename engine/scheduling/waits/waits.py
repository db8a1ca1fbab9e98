"""Wait stages: what requests wait for before they run, like a compiled grammar or KV that another worker computes.

A request enters every stage that it needs when it is added, and leaves each one when what it waited for is there. Its
status and its deadline are those of the first stage, in order, that it has not left. A request that has left all
of them is ready for the batch.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from engine.scheduling.requests.finish import Finish
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.status import RequestStatus
from engine.scheduling.waits.deadlines import Deadline, Deadlines


@dataclass(frozen=True)
class Ready:
    """A request whose wait in a stage is over. finish: how it finishes, if it does; then it is still in the stage."""

    request: Request
    finish: Finish | None = None


class WaitStage(Protocol):
    """One thing that requests wait for. Used from the step thread."""

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
        """True while ``take_ready`` would return something."""

    def needs_wait(self, request: Request) -> bool:
        """Return whether this new request has to wait here."""

    def start(self, request: Request) -> None:
        """Start the wait of a request. Raises a KvbatonError to reject it; then nothing has changed."""

    def take_ready(self) -> Sequence[Ready]:
        """Return the requests whose wait is over, once each; those that did not fail have left the stage."""

    def give_up(self, request: Request) -> bool:
        """End the wait of a request that finishes; return whether this freed its blocks, or quarantined them."""

    def overdue(self, request: Request, seconds: float) -> Finish:
        """Return how a request finishes that has had this stage's status for ``seconds``."""

    def check_integrity(self, requests: Mapping[str, Request]) -> None:
        """Assert that the stage's own records match the live requests, by key."""


class Waits:
    """Owns which stages each request has not left, and their deadlines."""

    def __init__(self, stages: Sequence[WaitStage], deadlines: Deadlines) -> None:
        self._stages = list(stages)
        self._deadlines = deadlines
        self._pending: dict[str, list[WaitStage]] = {}

    @property
    def keys(self) -> Collection[str]:
        """Keys of the requests that wait."""
        return self._pending.keys()

    @property
    def has_pending(self) -> bool:
        """True while ``take_ready`` would return something."""
        return any(stage.has_pending for stage in self._stages)

    def start(self, request: Request) -> bool:
        """Enter the stages that a request needs, all or none; return whether it needs any. Raises what a stage raises."""
        needed = [stage for stage in self._stages if stage.needs_wait(request)]
        with ExitStack() as undo:
            for stage in needed:
                stage.start(request)
                undo.callback(stage.give_up, request)
            undo.pop_all()
        if needed:
            self._pending[request.key] = needed
            self._enter_first(request)
        return bool(needed)

    def take_ready(self) -> Iterator[Ready]:
        """Yield the requests that have left their last stage, and those that failed.

        The caller finishes each failed one before it takes the next.
        """
        for stage in self._stages:
            for ready in stage.take_ready():
                if ready.finish is not None or self._leave(ready.request, stage):
                    yield ready

    def give_up(self, request: Request) -> bool:
        """End the waits of a request that finishes; return whether a stage has freed its blocks, or quarantined them."""
        returned = [stage.give_up(request) for stage in self._pending.pop(request.key, ())]
        return any(returned)

    def overdue(self, request: Request, deadline: Deadline) -> Finish | None:
        """Return how a request finishes at the deadline of a stage; None if it has left the stage."""
        first = next(iter(self._pending.get(request.key, ())), None)
        return first.overdue(request, deadline.seconds) if first and first.name == deadline.stage else None

    def check_integrity(self, requests: Mapping[str, Request]) -> None:
        """Assert that each request that waits is live, and has the status of its first stage."""
        for key, stages in self._pending.items():
            assert stages and requests[key].status is stages[0].status
        for stage in self._stages:
            stage.check_integrity(requests)

    def _leave(self, request: Request, stage: WaitStage) -> bool:
        """Remove a request from a stage; return whether that was its last one."""
        stages = self._pending[request.key]
        is_first = stages[0] is stage
        stages.remove(stage)
        if not stages:
            del self._pending[request.key]
            request.status = RequestStatus.WAITING
        elif is_first:
            self._enter_first(request)
        return not stages

    def _enter_first(self, request: Request) -> None:
        stage = self._pending[request.key][0]
        request.status = stage.status
        self._deadlines.start(request.key, stage.timeout_seconds, stage.name)
