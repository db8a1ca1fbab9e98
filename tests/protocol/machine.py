"""One kind of worker as a finite machine: states are numbers, calls lead from one to another, and each is run once.

Production code runs for every (state, call) that is met for the first time; after that the answer is looked up. So the
explorer can walk millions of interleavings of a few thousand states of each worker.
"""

from collections.abc import Callable
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from contract.errors import InternalError
from tests.protocol.forking import fork, freeze
from tests.protocol.sink import LawBrokenError, Sink

Effect = tuple[Any, ...]
Call = tuple[Any, ...]


class Part(Protocol):
    """The object that a machine is made of."""

    sink: Sink

    def prepare(self) -> None:
        """Prepare the copy that will be called."""

    def carry_out(self) -> None:
        """Carry effects out until only those for others are left in the sink."""

    def tidy(self) -> None:
        """Check the laws, and make states equal that behave alike."""


P = TypeVar("P", bound=Part)


class Machine(Generic[P]):
    """Owns all states of one kind of part, each with its own number."""

    def __init__(self) -> None:
        self.states: list[P] = []
        self._numbers: dict[Any, int] = {}
        self._answers: dict[tuple[int, Call], tuple[int, tuple[Effect, ...]]] = {}
        self.views: dict[int, Any] = {}

    @property
    def num_answers(self) -> int:
        """The number of different calls that production code has answered."""
        return len(self._answers)

    def number(self, part: P) -> int:
        """Return the number of this part's state."""
        part.prepare()
        part.tidy()
        return self._intern(part)

    def call(self, state: int, *call: Any) -> tuple[int, tuple[Effect, ...]]:
        """Return (state afterwards, effects on others). Raises LawBrokenError, again for every repetition."""
        answer = self._answers.get((state, call))
        if answer is None:
            answer = self._answers[state, call] = self._run(state, call)
        return answer if answer[0] >= 0 else self._refuse(answer[1])

    def view(self, state: int, look: Callable[[P], Any]) -> Any:
        """Return ``look`` of a state; it is computed once, so always pass the same function."""
        seen = self.views.get(state)
        if seen is None:
            seen = self.views[state] = look(self.states[state])
        return seen

    def _run(self, state: int, call: Call) -> tuple[int, tuple[Effect, ...]]:
        part = fork(self.states[state])
        number, effects = self._ask(part, call)
        return (self._intern(part) if number == 0 else number), effects

    def _ask(self, part: P, call: Call) -> tuple[int, tuple[Effect, ...]]:
        """Return (0, effects), or (-1, the law that breaks)."""
        part.sink.take()
        try:
            part.prepare()
            result = getattr(part, call[0])(*call[1:])
            part.carry_out()
            effects = tuple(part.sink.take())
            part.tidy()
        except (AssertionError, InternalError, ValueError, LookupError) as error:
            return -1, ((str(error) if isinstance(error, LawBrokenError) else f"{call[0]}: {error!r}",),)
        return 0, effects if result is None else (*effects, ("result", result))

    def _refuse(self, effects: tuple[Effect, ...]) -> NoReturn:
        raise LawBrokenError(effects[0][0])

    def _intern(self, part: P) -> int:
        key = freeze(part)
        number = self._numbers.setdefault(key, len(self.states))
        if number == len(self.states):
            self.states.append(part)
        return number


class LiveMachine(Machine[P]):
    """A machine for one schedule without going back: a state's number names a part, which changes in place."""

    def number(self, part: P) -> int:
        self.states.append(part)
        return len(self.states) - 1

    def call(self, state: int, *call: Any) -> tuple[int, tuple[Effect, ...]]:
        part = self.states[state]
        number, effects = self._ask(part, call)
        return (state, effects) if number == 0 else self._refuse(effects)

    def view(self, state: int, look: Callable[[P], Any]) -> Any:
        return look(self.states[state])
