"""The loop around a core: steps follow each other while nobody says anything, and input is taken between two steps."""

from collections.abc import Callable
from typing import cast

from contract.requests import EngineOutput, EngineRequest
from engine.core import EngineCore
from engine.hosting.messages import AddRequest, FromEngine, Shutdown
from engine.hosting.step_loop import Inbox, StepLoop
from engine.mailbox import Mailbox
from tests.engine_scheduling.stepping import fake_request


class BusyCore:
    """Always has work, goes on where it may, and hears of a request in its third step."""

    def __init__(self, inbox: Inbox) -> None:
        self.is_under_way = False
        self.happened: list[str] = []
        self._inbox = inbox

    def needs_step(self) -> bool:
        return True

    def seconds_to_hold(self) -> float:
        return 0.0

    def step(
        self, meanwhile: Callable[[], None], may_go_on: Callable[[], bool]
    ) -> dict[int, list[EngineOutput]]:
        meanwhile()
        self.happened.append("goes on" if self.is_under_way else "begins")
        if len(self.happened) == 3:
            self._inbox.put(AddRequest(fake_request("late", [1, 2, 3])))
        if len(self.happened) == 5:
            self._inbox.put(Shutdown())
        self.is_under_way = may_go_on()
        return {}

    def add_request(self, request: EngineRequest) -> None:
        assert not self.is_under_way
        self.happened.append(request.request_id)


def test_a_step_goes_on_until_input_waits_which_is_taken_between_two_steps() -> None:
    inbox, said = Inbox(), list[FromEngine]()
    core = BusyCore(inbox)
    StepLoop(cast("EngineCore", core), inbox, said.append, idle_seconds=1.0).run()
    assert core.happened == ["begins", "goes on", "goes on", "late", "begins"]
    assert isinstance(inbox, Mailbox) and not inbox.num_waiting and not said


class HoldingCore(BusyCore):
    """Holds its second step until somebody has come."""

    def seconds_to_hold(self) -> float:
        if self.happened != ["begins"]:
            return 0.0
        self.happened.append("holds")
        self._inbox.put(AddRequest(fake_request("late", [1, 2, 3])))
        return 600.0

    def step(
        self, meanwhile: Callable[[], None], may_go_on: Callable[[], bool]
    ) -> dict[int, list[EngineOutput]]:
        meanwhile()
        self.happened.append("begins")
        if "late" in self.happened:
            self._inbox.put(Shutdown())
        return {}


def test_a_step_is_held_until_there_is_news() -> None:
    inbox, said = Inbox(), list[FromEngine]()
    core = HoldingCore(inbox)
    StepLoop(cast("EngineCore", core), inbox, said.append, idle_seconds=1.0).run()
    assert core.happened == ["begins", "holds", "late", "begins"]
