"""What the threads of the ranks' halves get done, as far as the ranks have reported it."""

import threading
from collections.abc import Mapping


class RankProgress:
    """Owns the ranks' last reports. Thread-safe.

    Each report counts too: the thread that listens to the line in a rank sends it, and takes it behind everything else
    that the rank was given. A rank is asked again once it has answered, so that one that hangs is not flooded.
    """

    def __init__(self, num_ranks: int) -> None:
        self._lock = threading.Lock()
        self._num_reports = [0] * num_ranks
        self._is_asked = [False] * num_ranks
        self._counts: dict[str, int] = {}

    def to_ask(self) -> list[int]:
        """Return the ranks that owe no report. From now on each of them does."""
        with self._lock:
            ranks = [rank for rank, is_asked in enumerate(self._is_asked) if not is_asked]
            for rank in ranks:
                self._is_asked[rank] = True
            return ranks

    def reported(self, rank: int, counts: Mapping[str, int]) -> None:
        """Take a rank's answer."""
        with self._lock:
            self._is_asked[rank] = False
            self._num_reports[rank] += 1
            for name, count in counts.items():
                self._counts[f"{name} on rank {rank}"] = count

    def counts(self) -> dict[str, int]:
        """Return every count by the name of its thread."""
        with self._lock:
            listeners = {f"listener on rank {rank}": count for rank, count in enumerate(self._num_reports)}
            return {**listeners, **self._counts}
