"""The loop around a core: steps follow each other while no input waits, and input is processed between two steps."""

from collections.abc import Callable
from typing import cast

import pytest

from contract.outputs import EngineOutput
from contract.requests import EngineRequest
from engine.core import EngineCore
from engine.hosting.messages import AddRequest, FromEngine, Health, Shutdown, StepOutputs
from engine.hosting.running import EnginePlan, run_engine
from engine.mailbox import Mailbox
from engine.scheduling.stats import SchedulerStats
from engine.settings import EngineSettings
from engine.stepping.gate import PacedGate, Work
from engine.stepping.loop import WAKE, Inbox, Put, StepLoop
from tests.engine_scheduling.gates import AllowingGate, DeviceExecutor
from tests.engine_scheduling.stepping import fake_request, fake_settings
from tests.fakes.engine.fakes import FakeExecutor, fake_answer, start_fake_executor


class BusyCore:
    """Always has work, starts steps early where it may, and gets a request in its third step."""

    def __init__(self, inbox: Inbox) -> None:
        self.gate = PacedGate(0.0, lambda: 0.0)
        self.step_in_flight = False
        self.happened: list[str] = []
        self._inbox = inbox

    def seconds_to_start(self) -> float:
        return 0.0

    def step(
        self, meanwhile: Callable[[], None], may_start_early: Callable[[], bool]
    ) -> dict[int, list[EngineOutput]]:
        meanwhile()
        self.happened.append("starts early" if self.step_in_flight else "starts")
        if len(self.happened) == 3:
            self._inbox.put(AddRequest(fake_request("late", [1, 2, 3])))
        if len(self.happened) == 5:
            self._inbox.put(Shutdown())
        self.step_in_flight = may_start_early()
        return {}

    def flush_urgent(self) -> dict[int, list[EngineOutput]]:
        return {}

    def add_request(self, request: EngineRequest) -> None:
        assert not self.step_in_flight
        self.happened.append(request.request_id)


def test_steps_start_early_until_input_waits_which_is_processed_between_two_steps() -> None:
    inbox, said = Inbox(), list[FromEngine]()
    core = BusyCore(inbox)
    StepLoop(cast("EngineCore", core), inbox, {0: said.append}, idle_seconds=1.0).run()
    assert core.happened == ["starts", "starts early", "starts early", "late", "starts"]
    assert isinstance(inbox, Mailbox) and not inbox.num_waiting and not said


class HoldingCore(BusyCore):
    """Delays its second step until a request has come."""

    def seconds_to_start(self) -> float:
        if self.happened != ["starts"]:
            return 0.0
        self.happened.append("delays")
        self._inbox.put(AddRequest(fake_request("late", [1, 2, 3])))
        return 600.0

    def step(
        self, meanwhile: Callable[[], None], may_start_early: Callable[[], bool]
    ) -> dict[int, list[EngineOutput]]:
        meanwhile()
        self.happened.append("starts")
        if "late" in self.happened:
            self._inbox.put(Shutdown())
        return {}


def test_a_step_is_delayed_until_a_message_comes() -> None:
    inbox, said = Inbox(), list[FromEngine]()
    core = HoldingCore(inbox)
    StepLoop(cast("EngineCore", core), inbox, {0: said.append}, idle_seconds=1.0).run()
    assert core.happened == ["starts", "delays", "late", "starts"]


class LongDelayCore(HoldingCore):
    """Delays its second step for longer than an idle loop waits for a message."""

    num_asked = 0

    def seconds_to_start(self) -> float:
        if self.happened != ["starts"]:
            return 0.0
        self.num_asked += 1
        if self.num_asked == 3:
            self._inbox.put(AddRequest(fake_request("late", [1, 2, 3])))
        return 600.0


def test_a_delay_is_not_over_when_an_idle_loop_would_report() -> None:
    inbox, said = Inbox(), list[FromEngine]()
    core = LongDelayCore(inbox)
    StepLoop(cast("EngineCore", core), inbox, {0: said.append}, idle_seconds=0.01).run()
    assert core.happened == ["starts", "late", "starts"]


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_gate_starts_one_step_each_time_that_it_is_allowed(num_tokens: int) -> None:
    """Issue 25: ranks that step together need a second gate; the engine's answers are the same."""
    inbox, said, gates = Inbox(), list[FromEngine](), list[AllowingGate]()

    def ask(gate: AllowingGate) -> None:
        gate.allow()
        inbox.put(WAKE)

    def make(_: Put) -> AllowingGate:
        gates.append(AllowingGate(ask))
        return gates[0]

    def emit(message: FromEngine) -> None:
        said.append(message)
        if isinstance(message, StepOutputs) and message.outputs[-1].is_leg_finished:
            inbox.put(Shutdown())

    inbox.put(AddRequest(fake_request("a", [1, 2, 3], max_tokens=num_tokens)))
    plan = EnginePlan(settings=fake_settings(), start=start_fake_executor, gate=make)
    assert run_engine(plan, inbox, emit)
    tokens = [t for m in said if isinstance(m, StepOutputs) for o in m.outputs for t in o.token_ids]
    assert tokens == fake_answer([1, 2, 3], num_tokens)
    assert num_tokens <= gates[0].num_started <= num_tokens + 1


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_no_step_begins_on_a_device_without_the_permission_of_its_gate(at_once: int) -> None:
    """Steps that run ahead ask it, too. One that allows several at once lets them run ahead, and no more."""
    inbox, gates, begun = Inbox(), list[AllowingGate](), list[tuple[int, int, int]]()
    said: list[FromEngine] = []

    def ask(gate: AllowingGate) -> None:
        gate.allow(at_once)
        inbox.put(WAKE)

    def make(_: Put) -> AllowingGate:
        gates.append(AllowingGate(ask))
        return gates[0]

    def start(settings: EngineSettings) -> tuple[FakeExecutor, int]:
        executor = DeviceExecutor(
            settings, lambda number: begun.append((number, gates[0].num_allowed, gates[0].num_started))
        )
        return executor, executor.memory.num_blocks

    def emit(message: FromEngine) -> None:
        said.append(message)
        if isinstance(message, StepOutputs) and message.outputs[-1].is_leg_finished:
            inbox.put(Shutdown())

    inbox.put(AddRequest(fake_request("a", [1, 2, 3], max_tokens=12)))
    assert run_engine(EnginePlan(settings=fake_settings(), start=start, gate=make), inbox, emit)
    tokens = [t for m in said if isinstance(m, StepOutputs) for o in m.outputs for t in o.token_ids]
    assert tokens == fake_answer([1, 2, 3], 12)
    assert len(begun) >= 12
    assert all(number <= num_allowed for number, num_allowed, _ in begun)
    # An ordinary start is recorded before the step begins, that of one that runs ahead when the one before has ended.
    num_ahead = sum(number > num_started for number, _, num_started in begun)
    assert (num_ahead > 0) is (at_once > 1)


@pytest.mark.parametrize(
    ("arrival", "pause", "may"), [(None, 0.0, True), (7.0, 0.0, False), (None, 0.1, False)]
)
def test_a_paced_gate_lets_no_step_run_ahead_of_a_request_or_a_pause(
    arrival: float | None, pause: float, may: bool
) -> None:
    work = cast("Work", Expecting(arrival, pause))
    assert PacedGate(0.03, lambda: 5.0).may_run_ahead(work) is may


class Expecting:
    """Work of which only these two answers are asked."""

    def __init__(self, arrival: float | None, pause: float) -> None:
        self._arrival, self._pause = arrival, pause

    def next_arrival(self) -> float | None:
        return self._arrival

    def seconds_to_pause(self) -> float:
        return self._pause


class SettlingCore:
    """Has no work. Its state changes once, without outputs, after it was reported."""

    def __init__(self, inbox: Inbox) -> None:
        self.gate = PacedGate(0.0, lambda: 0.0)
        self.step_in_flight = False
        self.scheduler = self
        self.load = self
        self.stats = SchedulerStats(num_leases=1)
        self._inbox = inbox
        self.num_reports = 0

    def make_stats(self) -> SchedulerStats:
        return self.stats

    def seconds_to_start(self) -> None:
        return None

    def seconds_to_deadline(self) -> None:
        return None

    def flush_urgent(self) -> dict[int, list[EngineOutput]]:
        return {}

    def note(self, message: FromEngine) -> None:
        assert isinstance(message, Health)
        self.num_reports += 1
        if self.num_reports == 1:
            self.stats = SchedulerStats(num_leases=0)
        else:
            self._inbox.put(Shutdown())


def test_an_idle_loop_reports_a_new_state_long_before_it_reports_an_old_one() -> None:
    """A lease ends without outputs: its router must not wait for the next sign of life."""
    inbox = Inbox()
    core = SettlingCore(inbox)
    StepLoop(cast("EngineCore", core), inbox, {0: core.note}, idle_seconds=600.0).run()
    assert core.num_reports == 2
