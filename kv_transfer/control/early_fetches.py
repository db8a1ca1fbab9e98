"""Fetches that begin before their requests are added to the scheduler, and connections that are opened ahead of fetches.

A request is added between two steps. The thread that receives it need not wait for that to ask its sender: when the step
has ended, the sender has answered, and the request reserves its blocks at once. The first fetch from a sender need not open
connections, if another request was expected from it before.
"""

import threading
from collections.abc import Callable, Iterable
from functools import partial

from contract.requests import EngineRequest, ReceiveTransfer
from engine.connector import TransferEvent
from kv_transfer.control.fetching import FetchTransfers
from kv_transfer.links.link import PeerRef
from kv_transfer.protocol.handshake import PeerTarget
from kv_transfer.protocol.messages import Message, Ping
from kv_transfer.protocol.reads import Source

Then = Callable[[], None]
Connect = Callable[[Source, Then], None]
"""Opens what a source is read over, and makes the call when that is over, even if it has failed: within this call or in any
thread.
"""


class ConnectionsAhead:
    """Owns the calls that wait for connections. Thread-safe; makes all calls without its lock.

    dial: sends a message to a peer, over a link that is made if there is none.
    """

    def __init__(self, dial: Callable[[PeerTarget, Message], None], connect: Connect) -> None:
        self._dial = dial
        self._connect = connect
        self._lock = threading.Lock()
        self._sources: dict[PeerRef, Source] = {}
        """The peers to which there is a link."""
        self._open: set[PeerRef] = set()
        """The peers that need not be connected to any more."""
        self._waiting: dict[PeerRef, list[Then]] = {}

    def connect(self, transfer: ReceiveTransfer, then: Then) -> None:
        """See ``ExpectsRequests``. The link is made by a ping, to which a sender sends nothing."""
        ref = PeerRef(transfer.peer_boot_id, is_dialed=True)
        with self._lock:
            is_open = ref in self._open
            is_first = ref not in self._waiting
            source = self._sources.get(ref)
            if not is_open:
                self._waiting.setdefault(ref, []).append(then)
        if is_open:
            then()
        elif is_first and source is not None:
            self._begin(ref, source)
        elif is_first:
            self._dial(
                PeerTarget(transfer.peer_worker_id, transfer.peer_boot_id, transfer.peer_control), Ping()
            )

    def link_up(self, ref: PeerRef, source: Source) -> None:
        """Record where a peer is read, to which there is a link now; connect if a call waits for that."""
        with self._lock:
            self._sources[ref] = source
            is_awaited = ref in self._waiting
        if is_awaited:
            self._begin(ref, source)

    def link_down(self, ref: PeerRef) -> None:
        """Record that the link to a peer has ended, or could not be made: nothing waits for it any more."""
        with self._lock:
            self._sources.pop(ref, None)
            self._open.discard(ref)
            waiting = self._waiting.pop(ref, [])
        _make(waiting)

    def _begin(self, ref: PeerRef, source: Source) -> None:
        self._connect(source, partial(self._end, ref, source))

    def _end(self, ref: PeerRef, source: Source) -> None:
        with self._lock:
            # The link may have ended, and come up anew, while the connection was being opened.
            if self._sources.get(ref) == source:
                self._open.add(ref)
            waiting = self._waiting.pop(ref, [])
        _make(waiting)


def _make(calls: Iterable[Then]) -> None:
    for call in calls:
        call()


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
        self.pop_received = fetches.pop_received
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
            # Else ``start_fetch`` would take the fetch for one that has begun.
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

    def pop_events(self) -> list[TransferEvent]:
        """See ``ReceiverConnector``."""
        events = self.fetches.pop_events()
        with self._lock:
            events = self._kept + events
            # The scheduler does not have these requests yet.
            self._kept = [event for event in events if event.key in self._expected]
            return [event for event in events if event.key not in self._expected]

    def has_events(self) -> bool:
        """Return True when ``pop_events`` would return some, or keep some, or raise."""
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
