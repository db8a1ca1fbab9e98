"""Fetches that begin before their requests are added to the scheduler.

A request is added between two steps. The thread that receives it need not wait for that to ask its sender: when the step
has ended, the sender has answered, and the request reserves its blocks at once.
"""

import threading

from contract.requests import EngineRequest
from engine.connector import TransferEvent
from kv_transfer.control.connecting import ConnectionsAhead
from kv_transfer.control.fetching import FetchTransfers


class EarlyFetches:
    """Fulfils ``ReceiverConnector`` and ``ExpectsRequests``: keeps the events of a fetch until its request is added.

    fetches: all of them, expected ones included. ``expect`` is called from any thread, what changes a fetch from the
    scheduler's. connections: those that are opened ahead.
    """

    def __init__(self, fetches: FetchTransfers, connections: ConnectionsAhead) -> None:
        self.fetches = fetches
        self.connections = connections
        self._lock = threading.Lock()
        self._expected: set[str] = set()
        """Keys for which ``start_fetch`` was not called yet."""
        self._kept: list[TransferEvent] = []
        self.connect = connections.connect
        self.receive_into = fetches.receive_into
        self.take_received = fetches.take_received
        self.next_arrival = fetches.next_arrival
        self.has_arrived = fetches.has_arrived

    def expect(self, request: EngineRequest) -> None:
        """See ``ExpectsRequests``. Raises InternalError for a request whose KV is being fetched already."""
        with self._lock:
            if request.key in self._expected:
                return
            self._expected.add(request.key)
        try:
            self.fetches.start_fetch(request)
        except BaseException:
            with self._lock:
                self._expected.remove(request.key)
            raise

    def drop_expected(self, key: str) -> None:
        """See ``ExpectsRequests``."""
        if self._is_added(key):
            self.cancel_fetch(key)

    def start_fetch(self, request: EngineRequest) -> None:
        """See ``ReceiverConnector``."""
        if not self._is_added(request.key):
            self.fetches.start_fetch(request)

    def cancel_fetch(self, key: str) -> bool:
        """See ``ReceiverConnector``."""
        with self._lock:
            self._kept = [event for event in self._kept if event.key != key]
        return self.fetches.cancel_fetch(key)

    def take_events(self) -> list[TransferEvent]:
        """See ``ReceiverConnector``."""
        events = self.fetches.take_events()
        with self._lock:
            events = self._kept + events
            self._kept = [event for event in events if event.key in self._expected]
            return [event for event in events if event.key not in self._expected]

    def has_events(self) -> bool:
        """Return True when ``take_events`` would return some, or keep some, or raise."""
        with self._lock:
            if any(event.key not in self._expected for event in self._kept):
                return True
        return self.fetches.has_events()

    def _is_added(self, key: str) -> bool:
        """Let an expected fetch be one of a request; return False if it was not expected."""
        with self._lock:
            is_expected = key in self._expected
            self._expected.discard(key)
            return is_expected
