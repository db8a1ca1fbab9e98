"""The assembly of a connector, and the factory that a worker passes to its engine."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from contract.layout import Side
from engine.connector import ConnectorPair, RanksConnector
from kv_transfer.control.control_half import ControlHalf, ControlParts
from kv_transfer.control.fetch_effects import FetchPorts
from kv_transfer.control.fetching import FetchSettings, FetchTransfers
from kv_transfer.control.sending import SendPorts, SendSettings, SendTransfers
from kv_transfer.counters import Completions, Counters
from kv_transfer.data.data_half import DataHalf
from kv_transfer.links.link import LinkSettings
from kv_transfer.links.link_loop import LinkLoop
from kv_transfer.protocol.handshake import LocalIdentity
from kv_transfer.ranks.rank_data import RankData, rank_settings
from kv_transfer.ranks.rank_data_group import MultiRankConnector, RankDataGroup
from kv_transfer.settings import TransferSettings
from kv_transfer.transports.choosing import Chooser

_Data = RankData | RankDataGroup


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
    each_rank = rank_settings(settings, side.num_ranks)
    with ExitStack() as undo:
        links = LinkLoop(_link_settings(settings), me.counters)
        undo.callback(links.close)
        data: _Data
        half: DataHalf | RankDataGroup
        connect: Callable[[Callable[[], None]], RanksConnector]
        if side.num_ranks == 1:
            only = each_rank[0]
            data = RankData(only, me.counters, me.completions, settings.local, settings.decorate)
            half = data.half
            connect = data.connector
        else:
            half = RankDataGroup(side.num_ranks, me.counters)
            data = half
            connect = partial(MultiRankConnector, each_rank, half, me.completions.take)
        undo.callback(data.close)
        sends = _send_transfers(me, data, links)
        fetches = _fetch_transfers(me, data.chooser, half, links)
        control = ControlHalf(
            ControlParts(sends, fetches, links, half, data.sessions, me.counters, me.completions)
        )
        data.attach(control)
        connector = connect(lambda: links.start(_identity(me, data), control))
        undo.pop_all()
    return ConnectorPair(control, connector, links.address)


@dataclass(frozen=True)
class _Worker:
    """The worker that a connector is made for, with the counters and completions that its parts share."""

    settings: TransferSettings
    side: Side
    model_fingerprint: str
    wake: Callable[[], None]
    counters: Counters = field(default_factory=Counters)
    completions: Completions = field(default_factory=Completions)


def _send_transfers(me: _Worker, data: _Data, links: LinkLoop) -> SendTransfers:
    settings = me.settings
    is_single = me.side.num_ranks == 1
    return SendTransfers(
        SendSettings(
            me.model_fingerprint,
            me.side.layout.block_size,
            settings.lease_seconds,
            settings.parked_seconds,
            num_layer_groups=settings.num_layer_groups if is_single else 1,
            estimates_ends=is_single,
        ),
        SendPorts(links.send, data.release, me.wake, links.look_by),
        me.counters,
        me.completions,
    )


def _fetch_transfers(
    me: _Worker, chooser: Chooser, half: DataHalf | RankDataGroup, links: LinkLoop
) -> FetchTransfers:
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
            chooser.pull,
            half.post_commit,
            me.wake,
            chooser.choose,
            chooser.alternatives,
        ),
        me.counters,
        me.completions,
    )


def _identity(me: _Worker, data: _Data) -> LocalIdentity:
    settings = me.settings
    return LocalIdentity(
        settings.worker_id,
        settings.boot_id,
        str(settings.role),
        settings.secret,
        me.model_fingerprint,
        me.side.layout,
        tuple(data.readers()),
        settings.peer_timeout_seconds,
        data.offers,
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
