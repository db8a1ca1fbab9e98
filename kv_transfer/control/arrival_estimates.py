"""Estimates when fetches will be complete, from their senders' estimates and from how late these usually are."""

from collections import deque
from dataclasses import dataclass
from statistics import median

from kv_transfer.links.link import PeerRef

_TOGETHER_SECONDS = 0.002
"""Fetches that one sender expects within this time are computed by one step there, and arrive together."""
_OVERDUE_SECONDS = 0.25
"""A fetch that is later than this is not expected any more."""
_NUM_REMEMBERED = 16


@dataclass
class _Expected:
    sender: PeerRef
    at: float


class ArrivalEstimates:
    """Owns the expected end of each fetch, by the receiver's clock. Not thread-safe."""

    def __init__(self) -> None:
        self._expected: dict[str, _Expected] = {}
        self._delays = deque[float](maxlen=_NUM_REMEMBERED)

    def expect(self, key: str, sender: PeerRef, at: float) -> None:
        """Record the sender's newest estimate for a fetch."""
        self._expected[key] = _Expected(sender, at)

    def arrived(self, key: str, now: float) -> None:
        """Record how late a fetch was, and expect those that belong to the same step at once."""
        one = self._expected.pop(key, None)
        if one is None:
            return
        usual = self._usual_delay
        self._delays.append(now - one.at)
        for other in self._expected.values():
            if other.sender == one.sender and abs(other.at - one.at) < _TOGETHER_SECONDS:
                other.at = now - usual

    def forget(self, key: str) -> None:
        """Stop expecting a fetch that has ended."""
        self._expected.pop(key, None)

    def next(self, now: float) -> float | None:
        """Return when the next fetch is expected, which may be just past; None if no sender has sent an estimate."""
        delay = self._usual_delay
        at = (one.at + delay for one in self._expected.values())
        return min((each for each in at if each > now - _OVERDUE_SECONDS), default=None)

    @property
    def _usual_delay(self) -> float:
        return median(self._delays) if self._delays else 0.0
