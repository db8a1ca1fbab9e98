"""Connections to senders that are opened ahead of fetches, so that the first fetch from a sender need not open them."""

import threading
from collections.abc import Callable, Iterable
from functools import partial

from contract.requests import ReceiveTransfer
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
            if self._sources.get(ref) == source:
                self._open.add(ref)
            waiting = self._waiting.pop(ref, [])
        _make(waiting)


def _make(calls: Iterable[Then]) -> None:
    for call in calls:
        call()
