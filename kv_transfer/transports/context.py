"""What every transport is opened with."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kv_transfer.protocol.reads import LeaseName
from kv_transfer.transports.leases import Sessions
from kv_transfer.transports.local import LocalHub


def _nobody_hears(_thread: str, _error: BaseException) -> None:
    """For who opens a transport without a connector; it is logged where it happens."""


@dataclass(frozen=True)
class TransportContext:
    """What a transport is opened with. on_idle: see ``SenderTransport.release``; called from any thread.

    shm_dir: see ``TransferSettings``. is_auto: opened beside others, because the worker's transport is ``auto``.
    on_thread_failed: told, in that thread, that one of the transport's has ended by a bug, so that it serves nobody more.
    """

    host: str
    advertise_host: str | None
    data_port: int
    boot_id: str
    read_timeout_seconds: float
    sessions: Sessions
    on_idle: Callable[[LeaseName], None]
    local: LocalHub | None = None
    shm_dir: Path | None = None
    is_auto: bool = False
    on_thread_failed: Callable[[str, BaseException], None] = _nobody_hears
