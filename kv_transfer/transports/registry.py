"""Transports by their names, best first; a transport's module is imported when it is opened."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from contract.errors import SettingError
from kv_transfer.transport import ReceiverTransport, SenderTransport, Transport
from kv_transfer.transports.context import TransportContext
from kv_transfer.transports.lending import IdleTogether

logger = logging.getLogger(__name__)
AUTO = "auto"


def _open_shm(context: TransportContext) -> Transport:
    from kv_transfer.transports.shm_receiver import ShmReceiver
    from kv_transfer.transports.shm_sender import ShmSender

    return Transport(ShmSender(context), ShmReceiver(context.read_timeout_seconds))


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


_TRANSPORTS: dict[str, Callable[[TransportContext], Transport]] = {
    "shm": _open_shm,
    "tcp": _open_tcp,
    "local": _open_local,
}
_AUTO_NAMES = ("shm", "tcp")
"""What ``auto`` offers, best first. The last of them works everywhere."""


def transport_names() -> tuple[str, ...]:
    """The names that ``open_transport`` knows."""
    return tuple(_TRANSPORTS)


def open_transport(name: str, context: TransportContext) -> Transport:
    """Open a transport by name. Raises SettingError that lists the right names, or says why it is not possible."""
    opener = _TRANSPORTS.get(name)
    if opener is None:
        raise SettingError(
            f"transport is {name!r}; choose one of {', '.join(transport_names())}", param="transport"
        )
    return opener(context)


def open_transports(
    name: str, context: TransportContext
) -> tuple[dict[str, SenderTransport], dict[str, ReceiverTransport]]:
    """Senders and receivers by transport, best first: one of each, or all that ``auto`` can do here.

    ``on_idle`` is called when all senders are idle. Nothing stays open when this raises.
    """
    names = _AUTO_NAMES if name == AUTO else (name,)
    opened: dict[str, Transport] = {}
    idle = IdleTogether(names, context.on_idle)
    try:
        for each in names:
            try:
                opened[each] = open_transport(each, replace(context, on_idle=partial(idle.say, each)))
            except SettingError as error:
                if each == names[-1]:
                    raise
                logger.warning("transport auto does without %s: %s", each, error.message)
                idle.leave_out(each)
    except BaseException:
        for transport in opened.values():
            transport.sender.close()
        raise
    return (
        {each: transport.sender for each, transport in opened.items()},
        {each: transport.receiver for each, transport in opened.items()},
    )
