"""Transports by their names, best first; a transport's module is imported when it is opened."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from contract.errors import SettingError
from kv_transfer.transports.context import TransportContext
from kv_transfer.transports.lending import IdleTogether
from kv_transfer.transports.settings import has_nvidia_gpu, has_rdma_device
from kv_transfer.transports.transport import ReceiverTransport, SenderTransport, Transport

logger = logging.getLogger(__name__)
AUTO = "auto"


def _open_shm(context: TransportContext) -> Transport:
    from kv_transfer.transports.shm.receiver import ShmReceiver
    from kv_transfer.transports.shm.sender import ShmSender

    return Transport(ShmSender(context), ShmReceiver(context.read_timeout_seconds))


def _open_nixl(context: TransportContext) -> Transport:
    from kv_transfer.transports.nixl.binding import load
    from kv_transfer.transports.nixl.nixl_thread import NixlThread
    from kv_transfer.transports.nixl.receiver import NixlReceiver, agent_name
    from kv_transfer.transports.nixl.sender import NixlSender

    if context.is_auto:
        context = replace(context, data_port=0)  # which is for tcp then
    nixl_thread = NixlThread(load(context.host), agent_name(context.boot_id), context.on_thread_failed)
    try:
        sender = NixlSender(context, nixl_thread)
    except BaseException:
        nixl_thread.close()
        raise
    return Transport(sender, NixlReceiver(nixl_thread, context.read_timeout_seconds))


def _open_nccl(context: TransportContext) -> Transport:
    from kv_transfer.transports.nccl.receiver import NcclReceiver
    from kv_transfer.transports.nccl.sender import NcclSender

    sender = NcclSender(context)
    host = context.advertise_host or context.host
    return Transport(sender, NcclReceiver(sender, host, context.read_timeout_seconds))


def _open_tcp(context: TransportContext) -> Transport:
    from kv_transfer.transports.tcp.receiver import TcpReceiver
    from kv_transfer.transports.tcp.sender import TcpSender

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
    "nixl": _open_nixl,
    "nccl": _open_nccl,
    "tcp": _open_tcp,
    "local": _open_local,
}


def transport_names() -> tuple[str, ...]:
    """The names that ``open_transport`` knows."""
    return tuple(_TRANSPORTS)


def auto_names(can_nixl_be_best: bool) -> tuple[str, ...]:
    """What ``auto`` offers, best first. The last of them works everywhere.

    Between host memories without an RDMA card ``nixl`` goes by plain TCP, at which ``tcp`` is faster.
    """
    if can_nixl_be_best:
        return ("shm", "nixl", "tcp")
    logger.info("transport auto does without nixl: there is neither an RDMA card nor an NVIDIA GPU here")
    return ("shm", "tcp")


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
    names = auto_names(has_rdma_device() or has_nvidia_gpu()) if name == AUTO else (name,)
    context = replace(context, is_auto=name == AUTO)
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
