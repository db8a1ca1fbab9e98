"""The record of one move of an answer, for metrics and ``/debug/state``."""

from dataclasses import dataclass, field
from typing import Any

from contract.outputs import RequestTimings


@dataclass
class MoveRecord:
    """One move. Times are seconds of the monotonic clock of this machine.

    ordered_at: when the source was ordered to hand the answer off; room at the target was reserved by then. handed_over_at:
    when the source's last entry arrived. targets: the workers that were to continue the answer, in order; the last one has.
    pause_seconds: from then until its first token; None until that. num_steps: the steps of the last target that the router
    received meanwhile, that of the token included. copying_seconds: the time that the KV took to cross.
    """

    request_id: str
    choice: int
    source: str
    ordered_at: float
    handed_over_at: float | None = None
    targets: list[str] = field(default_factory=list)
    pause_seconds: float | None = None
    num_steps: int = 0
    copying_seconds: float = 0.0

    def target_chosen(self, name: str, num_steps_until_now: int) -> None:
        """Record a target, and how many steps of it the router has received until now."""
        self.targets.append(name)
        self.num_steps = -num_steps_until_now

    def continued(self, now: float, num_steps_until_now: int, timings: RequestTimings | None) -> None:
        """Record the first token of the last target. timings: as the target has measured them."""
        assert self.handed_over_at is not None, "the source has handed the answer off"
        self.pause_seconds = now - self.handed_over_at
        self.num_steps += num_steps_until_now
        self.copying_seconds = timings.transfer.copying_seconds if timings else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for ``/debug/state``."""
        return dict(vars(self))
