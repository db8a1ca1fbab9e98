"""Counts what a router still has of a worker's former state."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class FormerWork:
    """Counts legs of a worker's former roles, and moves of answers away from it.

    on_nothing_left: called when there are none any more.
    """

    def __init__(self, on_nothing_left: Callable[[], None]) -> None:
        self.num_legs = 0
        self.num_moves = 0
        self._on_nothing_left = on_nothing_left

    @property
    def num_left(self) -> int:
        """The number of legs and moves together."""
        return self.num_legs + self.num_moves

    def leg_ended(self) -> None:
        """Stop counting one leg."""
        self.num_legs -= 1
        self._check()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Count a move, or several that follow each other, until the block ends."""
        self.num_moves += 1
        try:
            yield
        finally:
            self.num_moves -= 1
            self._check()

    def _check(self) -> None:
        if not self.num_left:
            self._on_nothing_left()
