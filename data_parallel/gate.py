"""The gate of a rank's steps: it starts none without the others."""

import logging
from functools import partial

from data_parallel.member import Member
from data_parallel.options import GroupPlan
from engine.settings import EngineSettings
from engine.stepping.gate import StepGate, Work
from engine.stepping.loop import Put

logger = logging.getLogger(__name__)


class GroupGate(StepGate):
    """Starts a step as soon as there is work, here or, by then with an empty batch, at another rank of the group.

    What each rank would decide for itself is off: delays for an arrival, restarted steps, and steps that run ahead would
    make all other ranks wait within their forward passes.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._has_left = False

    def seconds_to_start(self, work: Work) -> float | None:
        """See StepGate."""
        return 0.0 if self._member.steps.is_behind or work.needs_step() else None

    def may_continue(self, work: Work) -> bool:
        """See StepGate. The group has as many steps either way."""
        return True

    def may_run_ahead(self, work: Work) -> bool:
        """See StepGate."""
        return False

    def may_interrupt(self) -> bool:
        """See StepGate."""
        return False

    def must_compute(self) -> bool:
        """See StepGate: the others wait for this rank in the step's collectives."""
        return self._member.steps.is_behind

    def on_start(self, *, is_empty: bool) -> float:
        """See StepGate. A step that computes nothing, only because requests have finished, is none for the group."""
        if not is_empty:
            self._member.new_step()
        return 0.0

    def on_end(self, *, is_empty: bool) -> None:
        """See StepGate."""

    def complete_settings(self, settings: EngineSettings) -> EngineSettings:
        """See StepGate: the place where the ranks' collectives find each other.

        Drafts are off: whether they are worth their time is measured by one engine, and all ranks would wait for its steps.
        """
        plan = self._member.plan
        if settings.speculate != "none":
            logger.warning(
                "speculate is %s and has no effect: the engines of a data-parallel group do not speculate",
                settings.speculate,
            )
        found = {
            "speculate": "none",
            "data_parallel_rank": plan.dp_rank,
            "data_parallel_store": self._member.store_address,
            "data_parallel_host": plan.host,
        }
        return settings.model_copy(update=found)

    def on_interrupt(self) -> None:
        """See StepGate."""

    def counters(self) -> dict[str, float]:
        """See StepGate."""
        return {
            "group_steps_total": self._member.steps.local_step,
            "group_calls_total": self._member.counts["sent start_step"],
        }

    def may_end(self) -> bool:
        """See StepGate. All ranks leave together, after the last step that one of them has started."""
        if not self._has_left:
            self._has_left = True
            self._member.leave()
        is_over = self._member.is_over
        self._member.read_steps()  # a step that was announced before the last rank has left
        return is_over and not self._member.steps.is_behind

    def close(self) -> None:
        """See StepGate."""
        self._member.close()


def join_group(plan: GroupPlan, put: Put) -> GroupGate:
    """Join the group of a plan; return the gate of this rank's steps. In the engine's process. Raises what Member raises."""
    # Imported here: the process that starts an engine reads plans, and does not load torch.
    from engine.distributed.token_exchange import open_group_store

    return GroupGate(Member(plan, put, partial(open_group_store, plan.listen_host)))
