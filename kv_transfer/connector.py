"""The control half of a connector, its assembly, and the factory that a worker passes to its engine.

The control half connects a worker's sends and fetches, which own all state, to the links and to the data half. It is called
from the step thread (``SchedulerConnector``), from the I/O thread (links and time) and from the data half (reports).
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from contract.errors import ErrorKind, KvbatonError
from contract.layout import Side
from engine.connector import ConnectorPair, RanksConnector, SingleRankConnector
from kv_transfer.control.early_fetches import ConnectionsAhead, EarlyFetches
from kv_transfer.control.fetch_effects import FetchPorts
from kv_transfer.control.fetching import FetchTransfers
from kv_transfer.control.sending import SendTransfers
from kv_transfer.links.link import PeerRef
from kv_transfer.links.link_loop import LinkLoop
from kv_transfer.protocol import messages as msg
from kv_transfer.protocol.handshake import LocalIdentity, Session
from kv_transfer.protocol.orders import TransferMetadata
from kv_transfer.ranks.rank_data import RankData, rank_settings
from kv_transfer.ranks.rank_data_group import RankDataGroup
from kv_transfer.settings import LocalWorker, TransferSettings

logger = logging.getLogger(__name__)
# Kinds of a link's end that a request ends with unchanged; any other one becomes PEER_UNREACHABLE.
_LINK_ENDS = frozenset(
    {ErrorKind.WORKER_LOST, ErrorKind.INCOMPATIBLE, ErrorKind.TRANSFER_FAILED, ErrorKind.INTERNAL}
)


@dataclass(frozen=True)
class TransferFactory:
    """A picklable ``ConnectorFactory``."""

    settings: TransferSettings

    def __call__(self, side: Side, model_fingerprint: str, wake: Callable[[], None]) -> ConnectorPair:
        """Build both halves of one worker's connector, for an engine of any number of ranks.

        A single rank's half is opened in this process, and peers are served when this returns. Several ranks open their
        halves in processes of their own, and no peer is served before all have. Raises SettingError, and OSError when a
        port cannot be bound.
        """
        worker = LocalWorker(self.settings, side, model_fingerprint, wake)
        each_rank = rank_settings(self.settings, side)
        with ExitStack() as undo:
            links = LinkLoop(self.settings, worker.counters)
            undo.callback(links.close)
            data: RankData | RankDataGroup
            if worker.is_single_rank:
                data = RankData(each_rank[0], worker.counters, worker.completions)
            else:
                data = RankDataGroup(each_rank, worker.counters, worker.completions.drain)
            undo.callback(data.close)
            control = ControlHalf(worker, links, data)
            connector: RanksConnector
            if isinstance(data, RankData):
                # Reports may come as soon as peers are served.
                data.attach(control)
                control.serve()
                connector = SingleRankConnector(data.half)
            else:
                data.attach(control, control.serve)
                connector = data
            undo.pop_all()
        return ConnectorPair(
            control, connector, links.address, expecting=control.receiver, progress=control.progress
        )


class ControlHalf:
    """Fulfils ``SchedulerConnector``, ``LinkEvents`` and ``DataReports``."""

    def __init__(self, worker: LocalWorker, links: LinkLoop, data: RankData | RankDataGroup) -> None:
        half = data.half if isinstance(data, RankData) else data
        chooser = data.chooser
        self.sender = SendTransfers(worker, links.send, data.release, links.look_by)
        fetches = FetchTransfers(
            worker,
            FetchPorts(
                links.dial_and_send,
                links.send,
                chooser.pull,
                half.post_commit,
                chooser.choose,
                chooser.alternatives,
            ),
        )
        self.receiver = EarlyFetches(fetches, ConnectionsAhead(links.dial_and_send, data.connect_ahead))
        self._worker = worker
        self._links = links
        self._data = data
        self._half = half
        self.send_event = self.sender.send_event
        self.end_expected = self.sender.end_expected
        self.lease_idle = self.sender.lease_idle
        self.fetch_event = fetches.fetch_event

    def serve(self) -> None:
        """Begin to serve peers; called once, when the transports are open."""
        worker = self._worker
        opened = self._data.opened
        identity = LocalIdentity(
            worker.settings,
            worker.side,
            worker.model_fingerprint,
            tuple(opened().readers),
            lambda: opened().offers,
            lambda: opened().digest,
        )
        self._links.start(identity, self)

    def build_metadata(self) -> TransferMetadata | None:
        """Return this step's orders. Each is returned once, so the step that takes them must run."""
        orders = self.sender.pop_orders()
        return TransferMetadata(orders) if orders else None

    def has_work(self) -> bool:
        """Return True when events, completions or orders wait."""
        return self.receiver.has_events() or self.sender.has_orders() or not self._worker.completions.is_empty

    def debug_state(self) -> dict[str, Any]:
        """Return transfers, leases, peers and threads as plain data."""
        return {
            **self.receiver.fetches.debug_state(),
            "leases": self.sender.debug_state(),
            "links": self._links.debug_state(),
            "data": self._half.debug_state(),
        }

    def progress(self) -> dict[str, int]:
        """See ``ConnectorPair``."""
        return {"thread of the control links": self._links.progress(), **self._half.progress()}

    def counters(self) -> dict[str, float]:
        """Return counters and gauges."""
        return {**self._worker.counters.snapshot(), **self.sender.gauges(), **self.receiver.fetches.gauges()}

    def set_model_fingerprint(self, model_fingerprint: str) -> None:
        """See SchedulerConnector. A link that is not closed yet gives blocks whose digests its peer refuses."""
        self._worker.model_fingerprint = model_fingerprint
        self._links.set_model_fingerprint(model_fingerprint)

    def close(self) -> None:
        """Stop the I/O thread; to peers this looks like the worker's death."""
        self._links.close()

    def link_up(self, ref: PeerRef, session: Session, resume: Callable[[], None]) -> bool:
        """Use a link whose peer has authenticated. False: not every rank serves the peer before ``resume`` is called."""
        if ref.is_dialed:
            self.receiver.connections.link_up(ref, self.receiver.fetches.link_up(ref, session))
            return True
        return self._data.sessions.begin(session.token, resume)

    def link_down(self, ref: PeerRef, session: Session | None, error: KvbatonError) -> None:
        """End what depends on a peer that died, or could not be reached."""
        if ref.is_dialed:
            kind = error.kind if error.kind in _LINK_ENDS else ErrorKind.PEER_UNREACHABLE
            # The fetches first: when they have stopped their reads, the thread of the source can end.
            source = self.receiver.fetches.link_down(ref, kind, error.message)
            if source is not None:
                self._half.leave(source)
            self.receiver.connections.link_down(ref)
            return
        self.sender.on_peer_gone(ref.boot_id, error.message)
        if session is not None:
            self._data.sessions.end(session.token)

    def link_message(self, ref: PeerRef, message: msg.Message) -> None:
        """Process a message. The side that dialed fetches, the other one lends; others are dropped and counted."""
        # Any message shows that the receiver is alive, not only a ping.
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
                self.receiver.fetches.on_message(ref, message)
            case _:
                self._worker.counters.add("transfer_stale_messages_total")

    def tick(self, now: float) -> float:
        """See ``SendTransfers``."""
        return self.sender.tick(now)

    def thread_failed(self, thread: str, error: BaseException) -> None:
        """Log a bug that ended a thread of the connector, and end the engine at its next step."""
        logger.critical("thread %s ended because of a bug; this worker must end", thread, exc_info=error)
        self.receiver.fetches.fail(f"thread {thread} of the connector has failed: {error!r}")
