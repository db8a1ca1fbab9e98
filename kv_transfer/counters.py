"""Counters, and the completions that cross from the control half to the step thread."""

import threading
from collections import defaultdict
from collections.abc import Mapping


class Counters:
    """Counters by name; labels are part of it, as in ``transfer_blocks_total{transport=tcp}``. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Increase a counter; an amount of 0 makes it visible."""
        with self._lock:
            self._values[_full_name(name, labels)] += amount

    def merge(self, added: Mapping[str, float]) -> None:
        """Add another object's counters, as its ``snapshot`` returns them."""
        with self._lock:
            for name, amount in added.items():
                self._values[name] += amount

    def snapshot(self) -> dict[str, float]:
        """Return the current values by full name."""
        with self._lock:
            return dict(self._values)


def _full_name(name: str, labels: dict[str, str]) -> str:
    if not labels:
        return name
    inside = ",".join(f"{label}={value}" for label, value in sorted(labels.items()))
    return f"{name}{{{inside}}}"


class Completions:
    """Keys of requests whose hand-over is complete, until the step thread takes them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: set[str] = set()
        self._received: set[str] = set()

    def add_sent(self, key: str) -> None:
        """Add a request whose lent blocks have no reader any more."""
        with self._lock:
            self._sent.add(key)

    def add_received(self, key: str) -> None:
        """Add a request whose KV has arrived and is verified."""
        with self._lock:
            self._received.add(key)

    def discard_received(self, key: str) -> None:
        """Remove a request that was cancelled before it was taken."""
        with self._lock:
            self._received.discard(key)

    def take(self) -> tuple[set[str], set[str]]:
        """Return the keys (sent, received) since the last call."""
        with self._lock:
            taken = (self._sent, self._received)
            self._sent = set()
            self._received = set()
            return taken

    @property
    def has_received(self) -> bool:
        """True while a completed fetch waits to be taken."""
        with self._lock:
            return bool(self._received)

    @property
    def is_empty(self) -> bool:
        """True while nothing waits to be taken."""
        with self._lock:
            return not self._sent and not self._received
