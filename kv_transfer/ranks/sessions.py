"""The sessions of links to peers, where the ranks are those who let readers in."""

import threading
from collections.abc import Callable

from kv_transfer.ranks.words import BeginSession, EndSession, ToRank


class RankSessions:
    """Tells every rank of each session. A ``SessionBook``: a peer hears of its session when all ranks know it.

    Else it might show its token to a rank before that has heard of it, and be refused.
    """

    def __init__(self, num_ranks: int, say: Callable[[ToRank], None]) -> None:
        self._num_ranks = num_ranks
        self._say = say
        self._lock = threading.Lock()
        self._beginning: dict[str, tuple[set[int], Callable[[], None]]] = {}

    def begin(self, token: str, then: Callable[[], None]) -> bool:
        """False: ``then`` is called when every rank knows of it; not, if it ends before."""
        with self._lock:
            self._beginning[token] = (set(), then)
        self._say(BeginSession(token))
        return False

    def begun(self, rank: int, token: str) -> None:
        """This rank knows of it."""
        with self._lock:
            ranks, then = self._beginning.get(token, (set(), None))
            ranks.add(rank)
            if then is None or len(ranks) < self._num_ranks:
                return
            del self._beginning[token]
        then()

    def end(self, token: str) -> None:
        """The link is gone."""
        with self._lock:
            self._beginning.pop(token, None)
        self._say(EndSession(token))
