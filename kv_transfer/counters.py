"""Plain counters, and the completions that cross from the control half to the step thread. Thread-safe."""

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from functools import cache


class Counters:
    """Counters by name; labels are part of the name, as in ``transfer_blocks_total{transport=tcp}``.

    A histogram is a counter for each bucket (``name_bucket{le=0.1}``, cumulative), its ``name_sum`` and its ``name_count``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Count up; an amount of 0 makes the counter visible."""
        with self._lock:
            self._values[_full_name(name, labels)] += amount

    def declare(self, name: str, bounds: tuple[float, ...]) -> None:
        """Make a histogram visible, with these upper bounds of its buckets, in order."""
        with self._lock:
            for sample in (*_buckets(name, bounds), f"{name}_sum", f"{name}_count"):
                self._values[sample] += 0

    def observe(self, name: str, bounds: tuple[float, ...], value: float) -> None:
        """Count a value in a histogram, in each bucket whose bound is not below it."""
        first = bisect_left(bounds, value)
        with self._lock:
            for sample in _buckets(name, bounds)[first:]:
                self._values[sample] += 1
            self._values[f"{name}_sum"] += value
            self._values[f"{name}_count"] += 1

    def merge(self, added: Mapping[str, float]) -> None:
        """Count up by full names, as other counters' ``snapshot`` has them."""
        with self._lock:
            for name, amount in added.items():
                self._values[name] += amount

    def drain(self) -> dict[str, float]:
        """Return what was counted since the last call; afterwards nothing is."""
        with self._lock:
            drained = dict(self._values)
            self._values.clear()
            return drained

    def snapshot(self) -> dict[str, float]:
        """Return all values."""
        with self._lock:
            return dict(self._values)


@cache
def _buckets(name: str, bounds: tuple[float, ...]) -> tuple[str, ...]:
    """Return the names of a histogram's buckets."""
    return tuple(_full_name(f"{name}_bucket", {"le": bound}) for bound in (*map(str, bounds), "+Inf"))


def _full_name(name: str, labels: dict[str, str]) -> str:
    if not labels:
        return name
    inside = ",".join(f"{label}={value}" for label, value in sorted(labels.items()))
    return f"{name}{{{inside}}}"


class Completions:
    """Keys whose hand-over is done, until the step thread drains them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: set[str] = set()
        self._received: set[str] = set()

    def add_sent(self, key: str) -> None:
        """Record that the lent blocks of this request are not read any more."""
        with self._lock:
            self._sent.add(key)

    def add_received(self, key: str) -> None:
        """Record that the KV of this request has arrived and is verified."""
        with self._lock:
            self._received.add(key)

    def discard_received(self, key: str) -> None:
        """Drop a completed fetch: the request was cancelled before it was taken."""
        with self._lock:
            self._received.discard(key)

    def drain(self) -> tuple[set[str], set[str]]:
        """Return the keys (sent, received) since the last call."""
        with self._lock:
            drained = (self._sent, self._received)
            self._sent = set()
            self._received = set()
            return drained

    @property
    def has_received(self) -> bool:
        """A completed fetch is waiting to be drained."""
        with self._lock:
            return bool(self._received)

    @property
    def is_empty(self) -> bool:
        """There is nothing to drain."""
        with self._lock:
            return not self._sent and not self._received
