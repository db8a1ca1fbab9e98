"""The control half: a worker's sends and fetches over one I/O thread.

Called from the step thread (``SchedulerConnector``), from the I/O thread (links and time) and from the data half
(reports). ``SendTransfers`` and ``FetchTransfers`` own all state; this class connects them to links and data half.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from contract.errors import ErrorKind, KvbatonError
from kv_transfer.control.fetching import FetchTransfers
from kv_transfer.control.sending import SendTransfers
from kv_transfer.counters import Completions, Counters
from kv_transfer.links.link import PeerRef
from kv_transfer.links.link_loop import LinkLoop
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import messages as msg
from kv_transfer.protocol.handshake import Session
from kv_transfer.protocol.orders import TransferMetadata
from kv_transfer.protocol.reads import LeaseName, Source

logger = logging.getLogger(__name__)
_LINK_ENDS = frozenset(
    {ErrorKind.WORKER_LOST, ErrorKind.INCOMPATIBLE, ErrorKind.TRANSFER_FAILED, ErrorKind.INTERNAL}
)
"""Kinds of a link's end that a request ends with unchanged; any other one becomes PEER_UNREACHABLE."""


class DataSide(Protocol):
    """The data half, or those of several ranks, as the control half uses it."""

    def leave(self, source: Source) -> None:
        """Stop reading from a source whose link is gone."""

    def debug_state(self) -> dict[str, Any]:
        """Return the current jobs as plain data."""

    def progress(self) -> dict[str, int]:
        """See ``ShowsProgress``; of the data half's threads in this process."""


class SessionBook(Protocol):
    """The tokens by which peers with a control link may read."""

    def begin(self, token: str, then: Callable[[], None]) -> bool:
        """Accept a token. True: from now on. False: ``then`` is called once it is accepted, in any thread."""

    def end(self, token: str) -> None:
        """Reject the token of a link that is gone."""


@dataclass(frozen=True)
class ControlParts:
    """The parts of a control half."""

    sends: SendTransfers
    fetches: FetchTransfers
    links: LinkLoop
    data: DataSide
    sessions: SessionBook
    counters: Counters
    completions: Completions


class ControlHalf:
    """Fulfils ``SchedulerConnector``, ``LinkEvents`` and ``DataReports``."""

    def __init__(self, parts: ControlParts) -> None:
        self.sender = parts.sends
        self.receiver = parts.fetches
        self._links = parts.links
        self._data = parts.data
        self._sessions = parts.sessions
        self._counters = parts.counters
        self._completions = parts.completions

    def build_metadata(self) -> TransferMetadata | None:
        """Return this step's orders. Each is returned once, so the step that takes them must run."""
        orders = self.sender.take_orders()
        return TransferMetadata(orders) if orders else None

    def has_work(self) -> bool:
        """Return True when events, completions or orders wait."""
        return self.receiver.has_events() or self.sender.has_orders() or not self._completions.is_empty

    def debug_state(self) -> dict[str, Any]:
        """Return transfers, leases, peers and threads as plain data."""
        return {
            **self.receiver.debug_state(),
            "leases": self.sender.debug_state(),
            "links": self._links.debug_state(),
            "data": self._data.debug_state(),
        }

    def progress(self) -> dict[str, int]:
        """See ``ShowsProgress``."""
        return {"thread of the control links": self._links.progress(), **self._data.progress()}

    def counters(self) -> dict[str, float]:
        """Return counters and gauges."""
        return {**self._counters.snapshot(), **self.sender.gauges(), **self.receiver.gauges()}

    def close(self) -> None:
        """Stop the I/O thread; to peers this looks like the worker's death."""
        self._links.close()

    def link_up(self, ref: PeerRef, session: Session) -> None:
        """Use a link whose peer has authenticated."""
        if ref.is_dialed:
            self.receiver.link_up(ref, session)
        elif not self._sessions.begin(session.token, partial(self._links.release, ref, session.token)):
            self._links.hold(ref, session.token)

    def link_down(self, ref: PeerRef, session: Session | None, error: KvbatonError) -> None:
        """End what depends on a peer that died, or could not be reached."""
        if ref.is_dialed:
            kind = error.kind if error.kind in _LINK_ENDS else ErrorKind.PEER_UNREACHABLE
            source = self.receiver.link_down(ref, kind, error.message)
            if source is not None:
                self._data.leave(source)
            return
        self.sender.on_peer_gone(ref.boot_id, error.message)
        if session is not None:
            self._sessions.end(session.token)

    def link_message(self, ref: PeerRef, message: msg.Message) -> None:
        """Process a message. The side that dialed fetches, the other one lends; others are dropped and counted."""
        if not ref.is_dialed:
            self.sender.on_heartbeat(ref.boot_id)
        match message:
            case msg.Ping():
                return
            case msg.FetchBlocks() if not ref.is_dialed:
                self.sender.on_fetch(ref.boot_id, message)
            case msg.ReleaseLease() | msg.CancelFetch() if not ref.is_dialed:
                self.sender.on_release(ref.boot_id, message)
            case _ if isinstance(message, msg.SenderMessage) and ref.is_dialed:
                self.receiver.on_message(ref, message)
            case _:
                self._counters.add("transfer_stale_messages_total")

    def tick(self, now: float) -> float | None:
        """Expire overdue leases and parked fetches; return the next deadline."""
        return self.sender.tick(now)

    def send_event(self, key: str, event: ev.SendEvent) -> None:
        """See ``DataReports``."""
        self.sender.send_event(key, event)

    def end_expected(self, key: str, seconds: float) -> None:
        """See ``DataReports``."""
        self.sender.announce_end(key, seconds)

    def fetch_event(self, key: str, event: ev.FetchEvent) -> None:
        """See ``DataReports``."""
        self.receiver.fetch_event(key, event)

    def lease_idle(self, name: LeaseName) -> None:
        """See ``DataReports``."""
        self.sender.lease_idle(name)

    def thread_failed(self, thread: str, error: BaseException) -> None:
        """Log a bug that ended a thread of the connector, and end the engine at its next step."""
        logger.critical("thread %s ended because of a bug; this worker must end", thread, exc_info=error)
        self.receiver.fail(f"thread {thread} of the connector has failed: {error!r}")
