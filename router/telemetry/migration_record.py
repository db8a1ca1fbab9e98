"""The record of one move of an answer, for metrics and ``/debug/state``."""

from dataclasses import dataclass, field
from typing import Any

from contract.outputs import RequestTimings


@dataclass
class MigrationRecord:
    """One move. Times are seconds of the monotonic clock of this machine.

    ordered_at: when the source was ordered to hand the answer off; room at the target was reserved by then. handed_off_at:
    when the source's last entry arrived. targets: the workers that were to continue the answer, in order; the last one has.
    pause_seconds: from then until its first token; None until that. num_steps: the steps of the last target that the router
    received meanwhile, that of the token included. fetching_seconds: the part of the pause from when the KV could be read
    until all of it was verified at the target; it includes the wait for the target's blocks, and for reads before it.
    waiting_seconds: the part before that, from when the target asked the source for the KV. queue_seconds: the part behind
    it, from when the target's scheduler has noticed that until its step began; with a grammar, the wait for that too. The
    rest: the order's way, the step that ran at the target, the step of the token, and its way back.
    num_bytes: those of the KV that crossed. copying_seconds: the time that they took.
    """

    request_id: str
    choice: int
    source: str
    ordered_at: float
    handed_off_at: float | None = None
    targets: list[str] = field(default_factory=list)
    pause_seconds: float | None = None
    num_steps: int = 0
    waiting_seconds: float = 0.0
    fetching_seconds: float = 0.0
    queue_seconds: float = 0.0
    num_bytes: int = 0
    copying_seconds: float = 0.0

    def target_chosen(self, name: str, num_steps_until_now: int) -> None:
        """Record a target, and how many steps of it the router has received until now."""
        self.targets.append(name)
        # minus the count of now, so that only the difference to the later one remains
        self.num_steps = -num_steps_until_now

    def on_continued(self, now: float, num_steps_until_now: int, timings: RequestTimings | None) -> None:
        """Record the first token of the last target. timings: as the target has measured them."""
        assert self.handed_off_at is not None, "the source has handed the answer off"
        self.pause_seconds = now - self.handed_off_at
        self.num_steps += num_steps_until_now
        if timings:
            self.waiting_seconds = timings.transfer.waiting_seconds
            self.fetching_seconds = timings.transfer.exposed_seconds
            self.queue_seconds = timings.queue_seconds
            self.num_bytes = timings.transfer.num_bytes
            self.copying_seconds = timings.transfer.copying_seconds

    def __str__(self) -> str:
        """Return a line about a move that is over, for the log."""
        return (
            f"request {self.request_id} (choice {self.choice}) was moved from {self.source} to {self.targets[-1]}: "
            f"handing off {(self.handed_off_at or 0.0) - self.ordered_at:.3f} s; pause {self.pause_seconds or 0.0:.3f} s, "
            f"of it waiting for the source {self.waiting_seconds:.3f}, fetching {self.num_bytes} bytes "
            f"{self.fetching_seconds:.3f}, queue {self.queue_seconds:.3f}; {self.num_steps} steps"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for ``/debug/state``."""
        return dict(vars(self))
