"""The control half (``SchedulerConnector``): what is sent and what is fetched, over one I/O thread.

Called from the step thread (the scheduler's verbs), from the I/O thread (links and time) and from the data half
(reports). ``SendTransfers`` and ``FetchTransfers`` own all state; this class only forwards calls and
reports to them.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from contract.errors import ErrorKind, KvbatonError
from contract.requests import EngineRequest
from engine.connector import FirstToken, Received, TransferEvent
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
"""Kinds of a link's end that a request ends with as they are; with any other one the peer is out of reach."""


class DataSide(Protocol):
    """What the control half asks of the data half, or of those of several ranks."""

    def leave(self, source: Source) -> None:
        """The link of this source is gone."""

    def debug_state(self) -> dict[str, Any]:
        """What is moved now."""

    def progress(self) -> dict[str, int]:
        """See ``ShowsProgress``; of its threads in this process."""


class SessionBook(Protocol):
    """The tokens by which peers with a control link may read."""

    def begin(self, token: str, then: Callable[[], None]) -> bool:
        """Let in whoever shows this token. True: from now on. False: ``then`` is called, in any thread, when that is so."""

    def end(self, token: str) -> None:
        """The link is gone."""


@dataclass(frozen=True)
class ControlParts:
    """What the control half is made of."""

    sends: SendTransfers
    fetches: FetchTransfers
    links: LinkLoop
    data: DataSide
    sessions: SessionBook
    counters: Counters
    completions: Completions


class ControlHalf:
    """Fulfils ``SchedulerConnector``, ``LinkEvents`` and ``DataReports``. Requests are named by ``EngineRequest.key``."""

    def __init__(self, parts: ControlParts) -> None:
        self._sends = parts.sends
        self._fetches = parts.fetches
        self._links = parts.links
        self._data = parts.data
        self._sessions = parts.sessions
        self._counters = parts.counters
        self._completions = parts.completions

    def open_send(self, request: EngineRequest, block_ids: list[int], num_cached_tokens: int) -> None:
        """Lend the whole prompt's blocks."""
        self._sends.open(request, block_ids, num_cached_tokens)

    def publish(self, request_id: str, num_computed_tokens: int) -> None:
        """Have the coming step publish what it computes."""
        self._sends.publish(request_id, num_computed_tokens)

    def finish_send(self, request_id: str, first_tokens: list[FirstToken]) -> None:
        """Everything is computed; token 0 goes with the end."""
        self._sends.finish(request_id, first_tokens)

    def abandon_send(self, request_id: str, kind: str, message: str) -> None:
        """Nobody shall use it. A request that lends nothing is left alone."""
        self._sends.abandon(request_id, kind, message)

    def start_fetch(self, request: EngineRequest) -> None:
        """Ask for this request's KV."""
        self._fetches.start(request)

    def receive_into(self, request_id: str, block_ids: list[int], num_cached_blocks: int) -> None:
        """Pull the missing blocks, now and as they are announced."""
        self._fetches.receive_into(request_id, block_ids, num_cached_blocks)

    def cancel_fetch(self, request_id: str) -> bool:
        """True: free the blocks now. False: ``Drained`` follows."""
        return self._fetches.cancel(request_id)

    def take_received(self, request_id: str) -> Received:
        """What came with a finished fetch."""
        return self._fetches.take_received(request_id)

    def take_events(self) -> list[TransferEvent]:
        """Events since the last call. Raises InternalError once a thread of the connector has failed."""
        return self._fetches.take_events()

    def next_arrival(self) -> float | None:
        """When the next fetch is expected to be over."""
        return self._fetches.next_arrival()

    def has_arrived(self) -> bool:
        """See ``SchedulerConnector``."""
        return self._completions.has_received

    def build_metadata(self) -> TransferMetadata | None:
        """This step's orders; each is given out once, so the step that takes them must be run."""
        orders = self._sends.take_orders()
        return TransferMetadata(orders) if orders else None

    def has_work(self) -> bool:
        """True when events, completions or orders wait."""
        return self._fetches.has_events() or self._sends.has_orders() or not self._completions.is_empty

    def debug_state(self) -> dict[str, Any]:
        """Transfers, leases, peers and threads."""
        return {
            "fetches": self._fetches.debug_state(),
            "quarantine": self._fetches.quarantine(),
            "leases": self._sends.debug_state(),
            "links": self._links.debug_state(),
            "transports": self._fetches.transports(),
            "data": self._data.debug_state(),
        }

    def progress(self) -> dict[str, int]:
        """See ``ShowsProgress``."""
        return {"thread of the control links": self._links.progress(), **self._data.progress()}

    def counters(self) -> dict[str, float]:
        """Counters and gauges."""
        return {**self._counters.snapshot(), **self._sends.gauges(), **self._fetches.gauges()}

    def close(self) -> None:
        """Stop the I/O thread; peers see it as this worker's death."""
        self._links.close()

    def link_up(self, ref: PeerRef, session: Session) -> None:
        """A peer proved itself."""
        if ref.is_dialed:
            self._fetches.link_up(ref, session)
        else:
            release = partial(self._links.release, ref, session.token)
            if not self._sessions.begin(session.token, release):
                self._links.hold(ref, session.token)

    def link_down(self, ref: PeerRef, session: Session | None, error: KvbatonError) -> None:
        """A peer died, or could not be reached."""
        if ref.is_dialed:
            kind = error.kind if error.kind in _LINK_ENDS else ErrorKind.PEER_UNREACHABLE
            source = self._fetches.link_down(ref, kind, error.message)
            if source is not None:
                self._data.leave(source)
            return
        self._sends.peer_gone(ref.boot_id, error.message)
        if session is not None:
            self._sessions.end(session.token)

    def link_message(self, ref: PeerRef, message: msg.Message) -> None:
        """Whoever dialed fetches, whoever was dialed lends; a word from the wrong side is dropped and counted."""
        if not ref.is_dialed:
            self._sends.heard(ref.boot_id)
        match message:
            case msg.Ping():
                return
            case msg.FetchBlocks() if not ref.is_dialed:
                self._sends.fetch_asked(ref.boot_id, message)
            case msg.ReleaseLease() | msg.CancelFetch() if not ref.is_dialed:
                self._sends.let_go(ref.boot_id, message)
            case _ if isinstance(message, msg.SenderMessage) and ref.is_dialed:
                self._fetches.message(ref, message)
            case _:
                self._counters.add("transfer_stale_messages_total")

    def tick(self, now: float) -> float | None:
        """Deadlines of leases and parked fetches."""
        return self._sends.tick(now)

    def send_event(self, key: str, event: ev.SendEvent) -> None:
        """From the data half."""
        self._sends.send_event(key, event)

    def end_expected(self, key: str, seconds: float) -> None:
        """From the data half."""
        self._sends.announce_end(key, seconds)

    def fetch_event(self, key: str, event: ev.FetchEvent) -> None:
        """From the data half."""
        self._fetches.fetch_event(key, event)

    def lease_idle(self, name: LeaseName) -> None:
        """From the sender transport."""
        self._sends.lease_idle(name)

    def thread_failed(self, thread: str, error: BaseException) -> None:
        """From any thread of the connector: the engine ends at its next step, which this begins."""
        logger.critical("thread %s has ended by a bug; this worker must end", thread, exc_info=error)
        self._fetches.fail(f"thread {thread} of the connector has failed: {error!r}")
