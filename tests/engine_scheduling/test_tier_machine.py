"""The scheduler with a KV tier under any order of events: copies are late, cut short, cancelled and damaged.

The FakeRunner notices KV that came from a wrong or damaged slot, and what a late copy has overwritten.
"""

from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.engine_scheduling.stepping import fake_request
from tests.engine_scheduling.test_state_machine import MachineOfWholePrompts, SchedulerMachine
from tests.engine_scheduling.test_state_slots import MachineOfManySlots
from tests.engine_scheduling.test_window_machine import MachineOfWindows, config_of
from tests.soak_settings import machine_test


class MachineWithTier(SchedulerMachine):
    """A tier keeps copies of blocks. They are made at any time, of a part of the blocks, and slots are damaged."""

    memory: ClassVar[dict[str, Any]] = {"kv_cache_bytes": 10, "host_kv_bytes": 16, "max_model_len": 36}

    def __init__(self) -> None:
        super().__init__()
        self.tiers = self.engine.executor.tiers

    @rule(number=st.integers(0, 1), is_late=st.booleans(), has_begun=st.booleans(), hangs=st.booleans())
    def copy(self, number: int, is_late: bool, has_begun: bool, hangs: bool) -> None:
        """Make all copies, and let the next ones wait; or let the first one begin, which cannot be stopped then.

        If it hangs, a preemption does not get its copies made.
        """
        tier = self.tiers[number % len(self.tiers)]
        tier.hangs = hangs
        if has_begun:
            tier.begin()
        else:
            tier.settle()
        tier.is_late = is_late

    @rule(name=st.sampled_from("abcdefgh"), max_tokens=st.integers(4, 12), times=st.integers(0, 30))
    def compute_a_prompt(self, name: str, max_tokens: int, times: int) -> None:
        """One of a few long prompts, so that they evict each other, and come again."""
        prompt = [ord(name)] * 12 + [self.num_requests % 2]
        self.ask(fake_request(f"r{self.num_requests}", prompt, max_tokens, deadline_seconds=20.0))
        self.engine.step(times)

    @rule(num_kept=st.integers(0, 2))
    def fill_the_tiers(self, num_kept: int) -> None:
        for tier in self.tiers:
            tier.num_stores_kept = num_kept

    @precondition(lambda self: any(tier.contents for tier in self.tiers))
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        tier = data.draw(st.sampled_from([tier for tier in self.tiers if tier.contents]))
        tier.damage(data.draw(st.sampled_from(sorted(tier.contents))))

    @rule()
    def reset_prefix_cache(self) -> None:
        """A copy to the tier is no use of its blocks: it is waited for."""
        pools = self.engine.scheduler.pools
        is_copied = all(holder.startswith("tier:") for holder in pools.holders())
        is_idle = is_copied and not pools.count_by_state()["quarantined"]
        assert self.engine.core.call("reset_prefix_cache", []) is is_idle

    @rule()
    def run(self) -> None:
        for tier in self.tiers:
            tier.settle()
        self.engine.run()
        self.finish_copies()
        self.assert_idle_for_a_reason()

    def finish_copies(self) -> None:
        """Let every copy be made, and the engine go on, until neither has anything to do."""
        while any(tier.has_jobs for tier in self.tiers):
            for tier in self.tiers:
                tier.settle()
            self.engine.run()

    def teardown(self) -> None:
        for tier in self.tiers:
            tier.is_late = False
            tier.hangs = False
        self.finish_copies()
        super().teardown()


TestWithTier = machine_test(MachineWithTier, 40, 50)


class MachineWithTierOfWholePrompts(MachineWithTier, MachineOfWholePrompts):
    """With a tier on a device, and the other policy."""


TestWithTierOfWholePrompts = machine_test(MachineWithTierOfWholePrompts, 20, 50)


class MachineWithTwoTiers(MachineWithTier):
    """A small tier, and a slower one behind it, which may fail for good."""

    memory: ClassVar[dict[str, Any]] = {
        "kv_cache_bytes": 10,
        "host_kv_bytes": 5,
        "disk_kv_dir": "disk",
        "disk_kv_bytes": 20,
        "max_model_len": 36,
    }

    @rule(times=st.integers(0, 9))
    def fail(self, times: int) -> None:
        """Seldom, since there is no way back."""
        self.tiers[1].is_off |= times == 0


TestWithTwoTiers = machine_test(MachineWithTwoTiers, 10, 50)


class MachineWithTiersOfWindows(MachineWithTwoTiers, MachineOfWindows):
    """Two groups of layers, of each of which two tiers keep blocks; the group with a window runs short first."""


TestWithTiersOfWindows = machine_test(MachineWithTiersOfWindows, 20, 50)


class MachineWithTierOfOneWindow(MachineWithTier, MachineOfWindows):
    """All layers have the same window, so that no tier has the beginning of a text."""

    cache = config_of({6: 12})


TestWithTierOfOneWindow = machine_test(MachineWithTierOfOneWindow, 10, 50)


class MachineWithTiersOfStates(MachineWithTwoTiers, MachineOfManySlots):
    """Recurrent layers beside KV; a preempted request comes back with its states, or is computed again."""


TestWithTiersOfStates = machine_test(MachineWithTiersOfStates, 20, 50)
