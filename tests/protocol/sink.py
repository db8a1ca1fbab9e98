"""The effects that production objects ask of their ports, until the explorer carries them out."""

from collections.abc import Callable
from typing import Any

from kv_transfer.protocol.events import RetryStep


class LawBrokenError(AssertionError):
    """A state of the explored world breaks the law that the message names."""


class Sink:
    """The effects since the last ``take``, in order, and the contents of digests. Shared by all copies.

    climbed: the rungs that fetches have climbed. new_lease: names the lease that is opened now; set by the side that is
    called.
    """

    def __init__(self) -> None:
        self._asked: list[tuple[Any, ...]] = []
        self._digests: dict[Any, int] = {}
        self.climbed: set[tuple[RetryStep, ...]] = set()
        self.new_lease: Callable[[], str] = str

    def ask(self, *effect: Any) -> None:
        """Remember an effect."""
        self._asked.append(effect)

    def take(self) -> list[tuple[Any, ...]]:
        """Return everything since the last call."""
        taken, self._asked = self._asked, []
        return taken

    def digest(self, content: Any, seed: int) -> int:
        """Return a number that no other content or seed has."""
        return self._digests.setdefault((content, seed), len(self._digests) + 1)
