"""How a connector is put together, and the factory that a worker hands into its engine."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

from contract.layout import Side
from engine.connector import ConnectorPair, RanksConnector, SingleRankConnector
from kv_transfer.control.control_half import ControlHalf, ControlParts, SessionBook
from kv_transfer.control.fetching import FetchPorts, FetchSettings, FetchTransfers
from kv_transfer.control.sending import SendPorts, SendSettings, SendTransfers
from kv_transfer.counters import Completions, Counters
from kv_transfer.data.data_half import DataHalf
from kv_transfer.data.reports import DataReports
from kv_transfer.links.link_events import LinkSettings
from kv_transfer.links.link_loop import LinkLoop
from kv_transfer.protocol.handshake import LocalIdentity
from kv_transfer.protocol.messages import Offer
from kv_transfer.protocol.reads import LeaseName
from kv_transfer.ranks.rank_connector import MultiRankConnector
from kv_transfer.ranks.rank_data import RankData, rank_settings
from kv_transfer.ranks.rank_data_group import RankDataGroup
from kv_transfer.settings import TransferSettings
from kv_transfer.transports.choosing import Chooser


@dataclass(frozen=True)
class TransferFactory:
    """A picklable ``ConnectorFactory``."""

    settings: TransferSettings

    def __call__(self, side: Side, model_fingerprint: str, wake: Callable[[], None]) -> ConnectorPair:
        """See ``create_connector``."""
        return create_connector(self.settings, side, model_fingerprint, wake)


def create_connector(
    settings: TransferSettings, side: Side, model_fingerprint: str, wake: Callable[[], None]
) -> ConnectorPair:
    """Build both halves of one worker's connector, for an engine of any number of ranks.

    A single rank's half is opened in this process, and peers are served when this returns. Several ranks open their halves
    in processes of their own, and no peer is served before all have. Raises SettingError, and OSError when a port cannot
    be bound.
    """
    me = _Worker(settings, side, model_fingerprint, wake)
    with ExitStack() as undo:
        links = LinkLoop(_link_settings(settings), me.counters)
        undo.callback(links.close)
        ranks = _open_rank(me) if side.num_ranks == 1 else _prepare_ranks(me)
        undo.callback(ranks.close)
        sends = _send_transfers(me, ranks, links)
        fetches = _fetch_transfers(me, ranks, links)
        control = ControlHalf(
            ControlParts(sends, fetches, links, ranks.data, ranks.sessions, me.counters, me.completions)
        )
        ranks.attach(control)
        connector = ranks.connect(lambda: links.start(_identity(me, ranks), control))
        undo.pop_all()
    return ConnectorPair(control, connector, links.address)


@dataclass(frozen=True)
class _Worker:
    """What a worker's connector is made for, and what its parts share."""

    settings: TransferSettings
    side: Side
    model_fingerprint: str
    wake: Callable[[], None]
    counters: Counters = field(default_factory=Counters)
    completions: Completions = field(default_factory=Completions)


@dataclass(frozen=True)
class _Ranks:
    """The data half of the only rank, or those of several as one.

    readers: the transports that can be read over. connect: returns the executor's side; its argument begins to serve peers.
    """

    data: DataHalf | RankDataGroup
    chooser: Chooser
    sessions: SessionBook
    release: Callable[[LeaseName], None]
    readers: Callable[[], Iterable[str]]
    offers: Callable[[], list[Offer]]
    attach: Callable[[DataReports], None]
    close: Callable[[], None]
    connect: Callable[[Callable[[], None]], RanksConnector]


def _open_rank(me: _Worker) -> _Ranks:
    settings = me.settings
    only = rank_settings(settings, 1)[0]
    rank = RankData(only, me.counters, me.completions, settings.local, settings.decorate)

    def connect(serve: Callable[[], None]) -> RanksConnector:
        serve()
        return SingleRankConnector(rank.half)

    lending = rank.lending
    return _Ranks(
        data=rank.half,
        chooser=rank.chooser,
        sessions=rank.sessions,
        release=lending.release,
        readers=rank.readers.keys,
        offers=lending.offers,
        attach=rank.attach,
        close=lending.close,
        connect=connect,
    )


def _prepare_ranks(me: _Worker) -> _Ranks:
    settings = rank_settings(me.settings, me.side.num_ranks)
    group = RankDataGroup(len(settings), me.counters)
    return _Ranks(
        data=group,
        chooser=group.chooser,
        sessions=group.sessions,
        release=group.release,
        readers=group.abilities.readers,
        offers=group.abilities.offers,
        attach=group.attach,
        close=group.close,
        connect=lambda serve: MultiRankConnector(settings, group, me.completions, serve),
    )


def _send_transfers(me: _Worker, ranks: _Ranks, links: LinkLoop) -> SendTransfers:
    settings = me.settings
    is_single = me.side.num_ranks == 1
    return SendTransfers(
        SendSettings(
            me.model_fingerprint,
            me.side.layout.block_size,
            settings.lease_seconds,
            settings.parked_seconds,
            num_layer_groups=settings.num_layer_groups if is_single else 1,
            foresees_ends=is_single,
        ),
        SendPorts(links.send, ranks.release, me.wake, links.look_by),
        me.counters,
        me.completions,
    )


def _fetch_transfers(me: _Worker, ranks: _Ranks, links: LinkLoop) -> FetchTransfers:
    layout = me.side.layout
    return FetchTransfers(
        FetchSettings(
            me.model_fingerprint,
            layout.block_size,
            layout.block_bytes,
            reads_ahead=me.side.num_ranks == 1,
        ),
        FetchPorts(
            links.dial_and_send,
            links.send,
            ranks.chooser.pull,
            ranks.data.post_commit,
            me.wake,
            ranks.chooser.choose,
            ranks.chooser.alternatives,
        ),
        me.counters,
        me.completions,
    )


def _identity(me: _Worker, ranks: _Ranks) -> LocalIdentity:
    settings = me.settings
    return LocalIdentity(
        settings.worker_id,
        settings.boot_id,
        str(settings.role),
        settings.secret,
        me.model_fingerprint,
        me.side.layout,
        tuple(ranks.readers()),
        settings.peer_timeout_seconds,
        ranks.offers,
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
