"""Step gates for tests: the product's own, and one that starts a step only when another thread allows it."""

import math
import threading
from collections.abc import Callable

import pytest

from engine.stepping.dispatch import WAKE, Inbox
from engine.stepping.gate import StepGate, Work


class AllowingGate:
    """Starts no step before ``allow`` was called for it, as ranks that start their steps together do.

    ask: called when a step could start that was not allowed.
    """

    def __init__(self, ask: Callable[["AllowingGate"], None]) -> None:
        self._ask = ask
        self._is_allowed = threading.Event()
        self.num_started = 0

    def allow(self) -> None:
        """Allow one step. From any thread."""
        self._is_allowed.set()

    def seconds_to_start(self, work: Work) -> float | None:
        if not work.needs_step():
            return None
        if self._is_allowed.is_set():
            return 0.0
        self._ask(self)
        return math.inf

    def may_continue(self, work: Work) -> bool:
        return False

    def may_interrupt(self) -> bool:
        return False

    def started(self) -> float:
        assert self._is_allowed.is_set()
        self._is_allowed.clear()
        self.num_started += 1
        return 0.0

    def ended(self, *, is_empty: bool) -> None: ...

    def interrupted(self) -> None: ...


MakeGate = Callable[[Inbox], Callable[[], StepGate] | None]


def paced(_: Inbox) -> None:
    """Use the product's own gate."""


def allowed(inbox: Inbox) -> Callable[[], StepGate]:
    """Return a maker of gates of which another thread allows a step each time that they ask."""

    def allow(gate: AllowingGate) -> None:
        gate.allow()
        inbox.put(WAKE)

    return lambda: AllowingGate(lambda gate: threading.Thread(target=allow, args=(gate,)).start())


GATES = pytest.mark.parametrize("make_gate", [paced, allowed])
