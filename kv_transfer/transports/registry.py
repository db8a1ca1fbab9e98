"""Transports by their names; a transport's module is imported when it is opened."""

from collections.abc import Callable

from contract.errors import SettingError
from kv_transfer.transport import Transport
from kv_transfer.transports.context import TransportContext


def _open_tcp(context: TransportContext) -> Transport:
    from kv_transfer.transports.tcp_receiver import TcpReceiver
    from kv_transfer.transports.tcp_sender import TcpSender

    return Transport(TcpSender(context), TcpReceiver(context.read_timeout_seconds))


def _open_local(context: TransportContext) -> Transport:
    from kv_transfer.transports.local import LocalReceiver, LocalSender

    if context.local is None:
        raise SettingError("transport local needs a hub in local", param="local")
    return Transport(
        LocalSender(context.boot_id, context.sessions, context.on_idle, context.local),
        LocalReceiver(context.local),
    )


_TRANSPORTS: dict[str, Callable[[TransportContext], Transport]] = {"tcp": _open_tcp, "local": _open_local}


def transport_names() -> tuple[str, ...]:
    """The names that ``open_transport`` knows."""
    return tuple(_TRANSPORTS)


def open_transport(name: str, context: TransportContext) -> Transport:
    """Open a transport by name. Raises SettingError that lists the right names."""
    opener = _TRANSPORTS.get(name)
    if opener is None:
        raise SettingError(
            f"transport is {name!r}; choose one of {', '.join(transport_names())}", param="transport"
        )
    return opener(context)
