"""How a connector is put together, and the factory that a worker hands into its engine."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from contract.layout import KVLayout
from engine.connector import ConnectorPair
from kv_transfer.control import ControlHalf, ControlParts
from kv_transfer.counters import Completions, Counters
from kv_transfer.data import DataHalf
from kv_transfer.fetching import FetchDesk, FetchPorts, FetchSettings
from kv_transfer.handshake import LocalIdentity
from kv_transfer.leases import Sessions
from kv_transfer.links import LinkLoop, LinkSettings
from kv_transfer.sending import SendDesk, SendPorts, SendSettings
from kv_transfer.settings import AUTO, TransferSettings
from kv_transfer.transport import LeaseName, Transport
from kv_transfer.transports.context import TransportContext
from kv_transfer.transports.registry import open_transport

logger = logging.getLogger(__name__)


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
    name = settings.transport_in_use
    if settings.transport == AUTO:
        logger.info("transport auto: %s is the one that this version picks", name)
        counters.add("transfer_transport_auto_total", transport=name)
    links = LinkLoop(_link_settings(settings), counters)
    desks: list[SendDesk] = []

    def on_idle(lease: LeaseName) -> None:
        desks[0].lease_idle(lease)

    transport = _open(settings, name, sessions, on_idle)
    data = DataHalf(name, transport.receiver, counters, completions)
    sends = SendDesk(
        SendSettings(model_fingerprint, layout.block_size, settings.lease_seconds, settings.parked_seconds),
        SendPorts(links.send, transport.sender.release, wake, links.wake),
        counters,
        completions,
    )
    desks.append(sends)
    fetches = FetchDesk(
        FetchSettings(model_fingerprint, layout.block_size, layout.block_bytes),
        FetchPorts(links.dial_and_send, links.send, data.post_pull, data.post_commit, wake),
        counters,
        completions,
    )
    control = ControlHalf(ControlParts(sends, fetches, links, data, sessions, counters, completions))
    data.attach(transport.sender, control)
    identity = LocalIdentity(
        settings.worker_id,
        settings.boot_id,
        str(settings.role),
        settings.secret,
        model_fingerprint,
        layout,
        name,
        settings.peer_timeout_seconds,
        transport.sender.address,
    )
    links.start(identity, control)
    return ConnectorPair(control, data, links.address)


def _link_settings(settings: TransferSettings) -> LinkSettings:
    return LinkSettings(
        settings.host,
        settings.control_port,
        settings.advertise_host,
        settings.peer_timeout_seconds,
        settings.max_frame_bytes,
    )


def _open(
    settings: TransferSettings, name: str, sessions: Sessions, on_idle: Callable[[LeaseName], None]
) -> Transport:
    context = TransportContext(
        host=settings.host,
        advertise_host=settings.advertise_host,
        data_port=settings.data_port,
        boot_id=settings.boot_id,
        read_timeout_seconds=settings.read_timeout_seconds,
        sessions=sessions,
        on_idle=on_idle,
        local=settings.local,
    )
    transport = open_transport(name, context)
    if settings.decorate is None:
        return transport
    return Transport(transport.sender, settings.decorate(transport.receiver))
