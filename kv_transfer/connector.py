"""How a connector is put together, and the factory that a worker hands into its engine."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from contract.layout import KVLayout, Side
from engine.connector import ConnectorPair, RanksConnectorPair
from kv_transfer.control.control_half import ControlHalf, ControlParts
from kv_transfer.control.fetching import FetchPorts, FetchSettings, FetchTransfers
from kv_transfer.control.sending import SendPorts, SendSettings, SendTransfers
from kv_transfer.counters import Completions, Counters
from kv_transfer.data.data_half import DataHalf
from kv_transfer.links.link_loop import LinkLoop
from kv_transfer.links.open_links import LinkSettings
from kv_transfer.protocol.handshake import LocalIdentity
from kv_transfer.protocol.messages import Offer
from kv_transfer.protocol.orders import CommitJob
from kv_transfer.protocol.reads import LeaseName
from kv_transfer.ranks.halves import RankDataHalves
from kv_transfer.ranks.joined import JoinedParts, JoinedRanks, rank_settings
from kv_transfer.ranks.opening import Opening
from kv_transfer.ranks.receivers import of_ranks
from kv_transfer.ranks.trials import rank_receivers
from kv_transfer.settings import TransferSettings
from kv_transfer.transports.choosing import Chooser
from kv_transfer.transports.context import TransportContext
from kv_transfer.transports.leases import Sessions
from kv_transfer.transports.lending import Lending
from kv_transfer.transports.registry import open_transports


@dataclass(frozen=True)
class TransferFactory:
    """A picklable ``ConnectorFactory`` and ``RanksConnectorFactory``."""

    settings: TransferSettings

    def __call__(self, layout: KVLayout, model_fingerprint: str, wake: Callable[[], None]) -> ConnectorPair:
        """Build both halves in the process that calls; their ports are open when this returns."""
        return create_connector(self.settings, layout, model_fingerprint, wake)

    def for_ranks(self, side: Side, model_fingerprint: str, wake: Callable[[], None]) -> RanksConnectorPair:
        """Build the control half; the ranks' halves are opened by their executor."""
        return create_ranks_connector(self.settings, side, model_fingerprint, wake)


def create_connector(
    settings: TransferSettings, layout: KVLayout, model_fingerprint: str, wake: Callable[[], None]
) -> ConnectorPair:
    """Open the ports, start the I/O thread, and give both halves of one worker's connector.

    Raises SettingError, and OSError when a port cannot be bound.
    """
    counters = Counters()
    completions = Completions()
    sessions = Sessions()
    me = _Me(settings, Side(layout), model_fingerprint, wake)
    controls = list[ControlHalf]()

    def failed(thread: str, error: BaseException) -> None:
        for control in controls:
            control.thread_failed(thread, error)

    with ExitStack() as undo:
        links = LinkLoop(_link_settings(settings), counters)
        undo.callback(links.close)
        senders, receivers = open_transports(
            settings.transport_name,
            _context(settings, sessions, lambda lease: controls[0].lease_idle(lease), failed),
        )
        lending = Lending(senders)
        chooser = Chooser(of_ranks(receivers), counters)
        undo.callback(lending.close)
        receiver = chooser if settings.decorate is None else settings.decorate(chooser)
        data = DataHalf(receiver, counters, completions, tuple(receivers), settings.max_staging_bytes)
        chooser.attach(data.post_pull)
        sends = _send_transfers(me, lending, links, counters, completions)
        fetches = _fetch_transfers(me, data, chooser, links, counters, completions)
        control = ControlHalf(ControlParts(sends, fetches, links, data, sessions, counters, completions))
        controls.append(control)
        data.attach(lending, control)
        links.start(_identity(me, tuple(receivers), lending.offers), control)
        undo.pop_all()
    return ConnectorPair(control, data, links.address)


def create_ranks_connector(
    settings: TransferSettings, side: Side, model_fingerprint: str, wake: Callable[[], None]
) -> RanksConnectorPair:
    """As ``create_connector`` for an engine of several ranks, whose own processes open their transports later.

    No peer is served before they have. Raises SettingError for settings that several ranks cannot have, and OSError.
    """
    counters = Counters()
    completions = Completions()
    me = _Me(settings, side, model_fingerprint, wake)
    halves = RankDataHalves(side.num_ranks, counters)
    rank_settings(settings, 0, side.num_ranks)  # what is wrong with them is said here
    chooser = Chooser({}, counters)
    with ExitStack() as undo:
        links = LinkLoop(_link_settings(settings), counters)
        undo.callback(links.close)
        chooser.attach(halves.post_pull)
        sends = _send_transfers(me, halves, links, counters, completions)
        fetches = _fetch_transfers(me, halves, chooser, links, counters, completions)
        control = ControlHalf(
            ControlParts(sends, fetches, links, halves, halves.sessions, counters, completions)
        )
        halves.attach(control, chooser.forget)

        def serve(opening: Opening) -> None:
            chooser.add(rank_receivers(opening.readers, opening.probing, halves.forget, halves.trials))
            links.start(_identity(me, tuple(opening.readers), halves.offers), control)

        joined = JoinedRanks(settings, side.num_ranks, JoinedParts(halves, completions, serve, chooser.close))
        undo.pop_all()
    return RanksConnectorPair(control, joined, links.address)


@dataclass(frozen=True)
class _Me:
    """What a worker's connector is made for."""

    settings: TransferSettings
    side: Side
    model_fingerprint: str
    wake: Callable[[], None]


class _Releasing(Protocol):
    def release(self, name: LeaseName) -> None: ...


class _Committing(Protocol):
    def post_commit(self, job: CommitJob) -> None: ...


def _send_transfers(
    me: _Me, lending: _Releasing, links: LinkLoop, counters: Counters, completions: Completions
) -> SendTransfers:
    settings = me.settings
    return SendTransfers(
        SendSettings(
            me.model_fingerprint,
            me.side.layout.block_size,
            settings.lease_seconds,
            settings.parked_seconds,
            num_layer_groups=settings.num_layer_groups if me.side.num_ranks == 1 else 1,
            foresees_ends=me.side.num_ranks == 1,
        ),
        SendPorts(links.send, lending.release, me.wake, links.look_by),
        counters,
        completions,
    )


def _fetch_transfers(
    me: _Me,
    data: _Committing,
    chooser: Chooser,
    links: LinkLoop,
    counters: Counters,
    completions: Completions,
) -> FetchTransfers:
    return FetchTransfers(
        FetchSettings(
            me.model_fingerprint,
            me.side.layout.block_size,
            me.side.layout.block_bytes,
            reads_ahead=me.side.num_ranks == 1,
        ),
        FetchPorts(
            links.dial_and_send,
            links.send,
            chooser.pull,
            data.post_commit,
            me.wake,
            chooser.choose,
            chooser.alternatives,
        ),
        counters,
        completions,
    )


def _identity(me: _Me, transports: tuple[str, ...], offers: Callable[[], list[Offer]]) -> LocalIdentity:
    settings = me.settings
    return LocalIdentity(
        settings.worker_id,
        settings.boot_id,
        str(settings.role),
        settings.secret,
        me.model_fingerprint,
        me.side.layout,
        transports,
        settings.peer_timeout_seconds,
        offers,
        me.side.num_ranks,
    )


def _link_settings(settings: TransferSettings) -> LinkSettings:
    return LinkSettings(
        settings.host,
        settings.control_port,
        settings.advertise_host,
        settings.peer_timeout_seconds,
        settings.max_frame_bytes,
    )


def _context(
    settings: TransferSettings,
    sessions: Sessions,
    on_idle: Callable[[LeaseName], None],
    on_thread_failed: Callable[[str, BaseException], None],
) -> TransportContext:
    return TransportContext(
        host=settings.host,
        advertise_host=settings.advertise_host,
        data_port=settings.data_port,
        boot_id=settings.boot_id,
        read_timeout_seconds=settings.read_timeout_seconds,
        sessions=sessions,
        on_idle=on_idle,
        local=settings.local,
        shm_dir=settings.shm_dir,
        on_thread_failed=on_thread_failed,
    )
