"""The times at which workers were at fault: they part moves that a fault has met from those by drains and flips alone."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any


@dataclass
class Fault:
    """Something that was done to a worker, or to the link of two workers, on the monotonic clock."""

    workers: frozenset[str]
    begin: float
    end: float = inf

    def met(self, move: Mapping[str, Any]) -> bool:
        """Return True if it was on during a move, as a router records it, at its source or at one of its targets.

        A fault of a link has met a move between its two ends only.
        """
        continued_at = move["handed_off_at"] + move["pause_seconds"]
        ends = {move["source"], *move["targets"]}
        return self.workers <= ends and self.begin < continued_at and move["ordered_at"] < self.end


@dataclass
class Faults:
    """The faults of a run. A worker that starts, or that is slow, has none."""

    all: list[Fault] = field(default_factory=list)

    @contextmanager
    def on(self, *workers: str, at_least_seconds: float = 0.0) -> Iterator[None]:
        """Record a fault of a worker, or of a link of two, for as long as the block lasts, and for that time at least."""
        fault = Fault(frozenset(workers), time.monotonic())
        self.all.append(fault)
        try:
            yield
        finally:
            fault.end = max(time.monotonic(), fault.begin + at_least_seconds)

    def have_met(self, move: Mapping[str, Any]) -> bool:
        """Return True if a fault has met a move."""
        return any(fault.met(move) for fault in self.all)
