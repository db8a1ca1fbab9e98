"""How a connector is put together, and the factory that a worker hands into its engine."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from contract.layout import KVLayout
from engine.connector import ConnectorPair
from kv_transfer.choosing import Chooser
from kv_transfer.control import ControlHalf, ControlParts
from kv_transfer.counters import Completions, Counters
from kv_transfer.data import DataHalf
from kv_transfer.fetching import FetchDesk, FetchPorts, FetchSettings
from kv_transfer.handshake import LocalIdentity
from kv_transfer.leases import Sessions
from kv_transfer.links import LinkLoop, LinkSettings
from kv_transfer.messages import Offer
from kv_transfer.sending import SendDesk, SendPorts, SendSettings
from kv_transfer.settings import TransferSettings
from kv_transfer.transport import LeaseName
from kv_transfer.transports.context import TransportContext
from kv_transfer.transports.lending import Lending
from kv_transfer.transports.registry import open_transports


@dataclass(frozen=True)
class TransferFactory:
    """A picklable ``ConnectorFactory``."""

    settings: TransferSettings

    def __call__(self, layout: KVLayout, model_fingerprint: str, wake: Callable[[], None]) -> ConnectorPair:
        """Build both halves in the process that calls; their ports are open when this returns."""
        return create_connector(self.settings, layout, model_fingerprint, wake)


def create_connector(
    settings: TransferSettings, layout: KVLayout, model_fingerprint: str, wake: Callable[[], None]
) -> ConnectorPair:
    """Open the ports, start the I/O thread, and give both halves of one worker's connector.

    Raises SettingError, and OSError when a port cannot be bound.
    """
    counters, completions, sessions = Counters(), Completions(), Sessions()
    desks: list[SendDesk] = []
    with ExitStack() as undo:
        links = LinkLoop(_link_settings(settings), counters)
        undo.callback(links.close)
        senders, receivers = open_transports(
            settings.transport,
            _context(settings, sessions, lambda lease: desks[0].lease_idle(lease)),
        )
        lending, chooser = Lending(senders), Chooser(receivers, counters)
        undo.callback(lending.close)
        receiver = chooser if settings.decorate is None else settings.decorate(chooser)
        data = DataHalf(receiver, counters, completions, tuple(receivers), settings.max_staging_bytes)
        chooser.attach(data.post_pull)
        sends = SendDesk(
            SendSettings(
                model_fingerprint, layout.block_size, settings.lease_seconds, settings.parked_seconds
            ),
            SendPorts(links.send, lending.release, wake, links.wake),
            counters,
            completions,
        )
        desks.append(sends)
        fetches = FetchDesk(
            FetchSettings(model_fingerprint, layout.block_size, layout.block_bytes),
            FetchPorts(links.dial_and_send, links.send, chooser.pull, data.post_commit, wake, chooser.choose),
            counters,
            completions,
        )
        control = ControlHalf(ControlParts(sends, fetches, links, data, sessions, counters, completions))
        data.attach(lending, control)
        links.start(_identity(settings, layout, model_fingerprint, tuple(receivers), lending.offers), control)
        undo.pop_all()
    return ConnectorPair(control, data, links.address)


def _identity(
    settings: TransferSettings,
    layout: KVLayout,
    model_fingerprint: str,
    transports: tuple[str, ...],
    offers: Callable[[], list[Offer]],
) -> LocalIdentity:
    return LocalIdentity(
        settings.worker_id,
        settings.boot_id,
        str(settings.role),
        settings.secret,
        model_fingerprint,
        layout,
        transports,
        settings.peer_timeout_seconds,
        offers,
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
    settings: TransferSettings, sessions: Sessions, on_idle: Callable[[LeaseName], None]
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
    )
