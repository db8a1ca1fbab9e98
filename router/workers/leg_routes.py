"""The routes of a worker's stream: which leg receives which entries."""

from collections.abc import Callable, Iterable

from contract.errors import KvbatonError
from protos import worker_pb2 as pb
from router.tokens.inbox import Event

LegKey = tuple[str, int, int]
"""(request id, attempt, choice)"""


class LegRoutes:
    """Owns the receivers of the legs that are bound to one worker. num_stale_entries: entries that no leg was to receive."""

    def __init__(self) -> None:
        self.num_stale_entries = 0
        self._receivers: dict[LegKey, Callable[[Event], None]] = {}

    def bind(self, key: LegKey, receive: Callable[[Event], None]) -> None:
        """Pass the entries of a leg to ``receive``."""
        self._receivers[key] = receive

    def unbind(self, key: LegKey) -> None:
        """Drop whatever else arrives for a leg. Does nothing the second time."""
        self._receivers.pop(key, None)

    def deliver(self, entries: Iterable[pb.TokenEntry]) -> None:
        """Pass entries to their legs. Those of older attempts and unknown requests are dropped."""
        for entry in entries:
            if receive := self._receivers.get((entry.request_id, entry.attempt, entry.choice)):
                receive(entry)
            else:
                self.num_stale_entries += 1

    def drop(self, entries: Iterable[pb.TokenEntry]) -> None:
        """Drop entries of a worker that is gone."""
        self.num_stale_entries += sum(1 for _ in entries)

    def fail(self, new_error: Callable[[], KvbatonError]) -> None:
        """Pass an error of its own to every leg."""
        for receive in list(self._receivers.values()):
            receive(new_error())
