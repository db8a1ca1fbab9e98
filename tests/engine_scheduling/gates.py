"""Step gates for tests: the product's own, and one that starts a step only when another thread says so."""

import math
import threading
from collections.abc import Callable

import pytest

from engine.stepping.dispatch import WAKE, Inbox
from engine.stepping.gate import StepGate, Work


class ToldGate:
    """Starts no step before ``tell`` was called for it, as ranks that start their steps together do.

    ask: called when a step could start that was not told.
    """

    def __init__(self, ask: Callable[["ToldGate"], None]) -> None:
        self._ask = ask
        self._is_told = threading.Event()
        self.num_started = 0

    def tell(self) -> None:
        """Allow one step. From any thread."""
        self._is_told.set()

    def seconds_to_start(self, work: Work) -> float | None:
        if not work.needs_step():
            return None
        if self._is_told.is_set():
            return 0.0
        self._ask(self)
        return math.inf

    def may_continue(self, work: Work) -> bool:
        return False

    def may_interrupt(self) -> bool:
        return False

    def started(self) -> float:
        assert self._is_told.is_set()
        self._is_told.clear()
        self.num_started += 1
        return 0.0

    def ended(self, *, is_empty: bool) -> None: ...

    def interrupted(self) -> None: ...


MakeGate = Callable[[Inbox], Callable[[], StepGate] | None]


def paced(_: Inbox) -> None:
    """The product's own."""


def told(inbox: Inbox) -> Callable[[], StepGate]:
    """One that another thread tells, each time that it asks."""

    def tell(gate: ToldGate) -> None:
        gate.tell()
        inbox.put(WAKE)

    return lambda: ToldGate(lambda gate: threading.Thread(target=tell, args=(gate,)).start())


GATES = pytest.mark.parametrize("make_gate", [paced, told])
