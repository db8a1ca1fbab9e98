"""What the ranks' transports can do together: only what every rank can."""

import threading

from contract.errors import InternalError
from kv_transfer.protocol.messages import Offer
from kv_transfer.ranks.words import Opened


class Opening:
    """Gathers what each rank says when its half is open. Thread-safe."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._opened: dict[int, Opened] = {}
        self._changed = threading.Condition()

    def add(self, rank: int, opened: Opened) -> None:
        """This rank's half is open."""
        with self._changed:
            self._opened[rank] = opened
            self._changed.notify_all()

    def wait(self, timeout_seconds: float) -> None:
        """Until all are. Raises InternalError for those that are not in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.is_complete, timeout_seconds):
                missing = [rank for rank in range(self._num_ranks) if rank not in self._opened]
                raise InternalError(f"ranks {missing} did not open their transports in {timeout_seconds} s")

    @property
    def is_complete(self) -> bool:
        """All ranks' halves are open."""
        return len(self._opened) == self._num_ranks

    @property
    def readers(self) -> list[str]:
        """What every rank can read over, best first; nothing before all are open."""
        return self._shared([opened.readers for opened in self._in_order()])

    @property
    def probing(self) -> set[str]:
        """Those of them that have to be tried on some rank."""
        return {name for opened in self._in_order() for name in opened.probing}

    def offers(self) -> list[Offer]:
        """What every rank lends over, best first, with the address of each; nothing before all are open."""
        addresses = [
            {offer.transport: offer.address for offer in opened.offers} for opened in self._in_order()
        ]
        names = self._shared([list(of_rank) for of_rank in addresses])
        return [Offer(name, *self._split([of_rank[name] for of_rank in addresses])) for name in names]

    def _in_order(self) -> list[Opened]:
        with self._changed:
            return [self._opened[rank] for rank in range(self._num_ranks)] if self.is_complete else []

    @staticmethod
    def _shared(names: list[list[str]]) -> list[str]:
        return [name for name in names[0] if all(name in other for other in names)] if names else []

    @staticmethod
    def _split(addresses: list[str]) -> tuple[str, tuple[str, ...]]:
        return addresses[0], tuple(addresses[1:])
