"""What the I/O thread of the links is told to do."""

import threading
from collections import Counter, deque
from collections.abc import Callable

from kv_transfer.links.link import PeerRef


class LinkOrders:
    """Owns the orders that are not carried out yet. Thread-safe; one thread carries them out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders: deque[tuple[Callable[[], None], PeerRef | None]] = deque()
        self._num_for: Counter[PeerRef] = Counter()

    def add(self, act: Callable[[], None], ref: PeerRef | None = None) -> None:
        """``act`` has to be done behind what was ordered before; ``ref``: for that peer."""
        with self._lock:
            self._orders.append((act, ref))
            if ref is not None:
                self._num_for[ref] += 1

    def are_open_for(self, ref: PeerRef) -> bool:
        """Something that was ordered for this peer is not done."""
        return ref in self._num_for

    def carry_out(self) -> None:
        """Do everything, also what is ordered meanwhile."""
        while self._orders:
            act, ref = self._orders.popleft()
            try:
                act()
            finally:
                if ref is not None:
                    self._done(ref)

    def _done(self, ref: PeerRef) -> None:
        with self._lock:
            self._num_for[ref] -= 1
            if not self._num_for[ref]:
                del self._num_for[ref]
