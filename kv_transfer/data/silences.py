"""Sources that answer nothing: one read pays for finding out, those that wait behind it do not pay again."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.protocol.reads import PeerSilentError, Source

FIRST_PAUSE_SECONDS = 10.0
LONGEST_PAUSE_SECONDS = 60.0

_Key = tuple[str, str, str]


@dataclass
class _Silence:
    """A source that was silent: no read of it is tried before ``until``, and then one."""

    words: str
    pause_seconds: float
    until: float


class Silences:
    """Owns what is known of silent sources. Thread-safe.

    A time-out for each read does not bound a queue of reads. So after the first one that runs into it every read of the
    same source fails at once, for a pause that doubles with each further failure; the first read behind it is a trial.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._silences: dict[_Key, _Silence] = {}

    def check(self, source: Source) -> None:
        """Raise PeerSilentError while the source is not to be tried."""
        with self._lock:
            silence = self._silences.get(_key(source))
            left = 0.0 if silence is None else silence.until - self._clock()
        if silence is not None and left > 0:
            raise PeerSilentError(f"{silence.words}; it is not tried again for {left:.1f} s")

    def began(self, source: Source, error: PeerSilentError) -> None:
        """A read of the source ran into its time-out."""
        with self._lock:
            known = self._silences.get(_key(source))
            pause = FIRST_PAUSE_SECONDS if known is None else 2 * known.pause_seconds
            pause = min(pause, LONGEST_PAUSE_SECONDS)
            self._silences[_key(source)] = _Silence(error.message, pause, self._clock() + pause)

    def ended(self, source: Source) -> None:
        """The source has answered."""
        if self._silences:  # most reads find nothing here
            with self._lock:
                self._silences.pop(_key(source), None)

    def forget(self, source: Source) -> None:
        """The link is gone, over whatever transport and to whatever rank it was read."""
        with self._lock:
            for key in [key for key in self._silences if key[0] == source.token]:
                del self._silences[key]

    def debug_state(self) -> list[str]:
        """Return what is not tried now, for people."""
        now = self._clock()
        with self._lock:
            return [silence.words for silence in self._silences.values() if silence.until > now]


def _key(source: Source) -> _Key:
    return source.token, source.transport, source.address
