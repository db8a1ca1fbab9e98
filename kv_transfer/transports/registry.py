"""The transports by their names, best first.

To add a transport: copy the folder of one that is like it (``tcp`` is the smallest); it has a ``Sender`` (``leases.py``)
and a ``ProbingReceiver`` (``transport.py``), which publishes what it can do beyond reading as ``ReceiverTraits``. Write a
function here that opens both and enter it into ``_TRANSPORTS``. Add the name to ``TransferOptions.transport``, to
``auto_names`` if ``auto`` should offer it, and to the import contract of the transports in ``pyproject.toml``.

Shared parts: ``data_port.py`` for a sender, with the LeaseBook of ``leases.py`` if it answers requests or the
GenerationTable if it is read without; ``connection_cache.py`` for a receiver.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from contract.errors import SettingError
from kv_transfer.transports.nixl.settings import has_nvidia_gpu, has_rdma_device
from kv_transfer.transports.transport import AUTO, IdleTogether, Transport, TransportContext

logger = logging.getLogger(__name__)

# Each function imports its transport itself: the libraries of the others may be missing.


def _open_shm(context: TransportContext) -> Transport:
    from kv_transfer.transports.shm.receiver import ShmReceiver
    from kv_transfer.transports.shm.sender import ShmSender

    # The receiver first: unlike the sender, it has nothing to close.
    receiver = ShmReceiver(context.settings.read_timeout_seconds)
    return Transport(ShmSender(context), receiver)


def _open_nixl(context: TransportContext) -> Transport:
    from kv_transfer.transports.nixl.agent import load
    from kv_transfer.transports.nixl.receiver import NixlReceiver, SlowReads
    from kv_transfer.transports.nixl.sender import NixlSender

    settings = context.settings
    if settings.transport == AUTO:  # the port that was set is for tcp then
        context = replace(context, settings=settings.model_copy(update={"data_port": 0}))
    sender = NixlSender(context, load(settings.host))
    slow_reads = None if settings.transport == AUTO else SlowReads()  # auto takes the fastest
    return Transport(sender, NixlReceiver(sender.nixl_thread, settings.read_timeout_seconds, slow_reads))


def _open_nccl(context: TransportContext) -> Transport:
    from kv_transfer.transports.nccl.transport import NcclReceiver, NcclSender

    sender = NcclSender(context)
    return Transport(sender, NcclReceiver(sender, context.settings))


def _open_tcp(context: TransportContext) -> Transport:
    from kv_transfer.transports.tcp.transport import TcpReceiver, TcpSender

    return Transport(TcpSender(context), TcpReceiver(context.settings.read_timeout_seconds))


_TRANSPORTS: dict[str, Callable[[TransportContext], Transport]] = {
    "shm": _open_shm,
    "nixl": _open_nixl,
    "nccl": _open_nccl,
    "tcp": _open_tcp,
}


def transport_names() -> tuple[str, ...]:
    """Return the names that ``open_transport`` accepts."""
    return tuple(_TRANSPORTS)


def auto_names(can_nixl_be_best: bool) -> tuple[str, ...]:
    """Return the transports that ``auto`` opens, best first. The last one works everywhere."""
    if can_nixl_be_best:
        return ("shm", "nixl", "tcp")
    # Between host memories nixl uses plain TCP then, at which tcp is faster.
    logger.info("transport auto leaves nixl out: there is neither an RDMA card nor an NVIDIA GPU here")
    return ("shm", "tcp")


def open_transport(name: str, context: TransportContext) -> Transport:
    """Open a transport by name. Raises SettingError, with the valid names or the reason."""
    opener = _TRANSPORTS.get(name)
    if opener is None:
        raise SettingError(
            f"transport is {name!r}; choose one of {', '.join(transport_names())}", param="transport"
        )
    return opener(context)


def open_transports(context: TransportContext) -> dict[str, Transport]:
    """Open the transport that is set, or all that ``auto`` can open here; return them by name, best first.

    ``on_idle`` is called when all senders are idle. Nothing stays open when this raises.
    """
    name = context.settings.transport
    names = auto_names(has_rdma_device() or has_nvidia_gpu()) if name == AUTO else (name,)
    opened: dict[str, Transport] = {}
    idle = IdleTogether(opened, context.on_idle)
    try:
        for each in names:
            try:
                opened[each] = open_transport(each, replace(context, on_idle=partial(idle.report, each)))
            except SettingError as error:
                if each == names[-1]:
                    raise
                logger.warning("transport auto leaves %s out: %s", each, error.message)
    except BaseException:
        for transport in opened.values():
            transport.sender.close()
        raise
    return opened
