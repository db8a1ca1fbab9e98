"""Estimates when fetches will be over, from what their senders report and from how far off the reports usually were."""

from collections import deque
from dataclasses import dataclass
from statistics import median

from kv_transfer.links.link import PeerRef

_TOGETHER_SECONDS = 0.002
"""What one sender expects within so little was computed in one step there, and comes one right behind the other."""
_OVERDUE_SECONDS = 0.25
"""Nobody goes on expecting one that is later than this."""
_NUM_REMEMBERED = 16


@dataclass
class _Expected:
    sender: PeerRef
    at: float


class ArrivalEstimates:
    """Owns the expected end of each fetch of one receiver, by the receiver's clock. Not thread-safe."""

    def __init__(self) -> None:
        self._expected: dict[str, _Expected] = {}
        self._delays = deque[float](maxlen=_NUM_REMEMBERED)

    def expect(self, key: str, sender: PeerRef, at: float) -> None:
        """The sender's newest guess about the fetch of request ``key``."""
        self._expected[key] = _Expected(sender, at)

    def arrived(self, key: str, now: float) -> None:
        """It is over: guesses are corrected by it, and those that belong to it follow at once."""
        one = self._expected.pop(key, None)
        if one is None:
            return
        usual = self._usual_delay
        self._delays.append(now - one.at)
        for other in self._expected.values():
            if other.sender == one.sender and abs(other.at - one.at) < _TOGETHER_SECONDS:
                other.at = now - usual

    def forget(self, key: str) -> None:
        """Nothing will arrive."""
        self._expected.pop(key, None)

    def next(self, now: float) -> float | None:
        """When the next one is expected; may have just been. None: nobody has said so of any."""
        delay = self._usual_delay
        at = (one.at + delay for one in self._expected.values())
        return min((each for each in at if each > now - _OVERDUE_SECONDS), default=None)

    @property
    def _usual_delay(self) -> float:
        return median(self._delays) if self._delays else 0.0
