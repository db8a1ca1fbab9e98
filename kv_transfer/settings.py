"""The part of the settings that a connector needs, checked when it is made."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from contract.errors import SettingError
from contract.identity import Role
from kv_transfer.staging import DEFAULT_STAGING_BYTES
from kv_transfer.transport import ReceiverTransport
from kv_transfer.transports.local import LocalHub
from kv_transfer.transports.nixl_library import why_missing
from kv_transfer.transports.registry import AUTO, transport_names
from kv_transfer.transports.shm_folder import why_unsupported

TransportName = Literal["auto", "shm", "nixl", "nccl", "tcp"]
"""What a user may ask for. ``auto``: the best that both workers of a pair can do."""


@dataclass(frozen=True, kw_only=True)
class TransferSettings:
    """How one worker hands KV over. Raises SettingError with the name, the value and the allowed range.

    host: the address that the control and data ports bind to. advertise_host: what peers are told to dial, where that
    differs (a wildcard bind, a NAT). control_port, data_port: 0 lets the system choose. lease_seconds: how long blocks
    are lent without a heartbeat, or without anybody fetching them. parked_seconds: how long a fetch waits for a
    transfer that is not known yet. peer_timeout_seconds: silence that counts as a peer's death.
    read_timeout_seconds: a data connection that moves no byte for so long fails its transfer. max_staging_bytes: host
    memory for blocks of one peer that must be converted, unless one block of ours needs more. num_layer_groups: in how many
    parts the last blocks of a long prompt are lent, as their layers are computed; 1 is as a whole. shm_dir: the folder
    of the sockets of ``shm``; None is a fresh private one in the system's temporary folder. local: where ``local``
    transports meet. decorate: wraps the receiver (fault injection in tests).
    """

    worker_id: str
    boot_id: str
    role: Role
    secret: str = field(repr=False)
    host: str = "127.0.0.1"
    advertise_host: str | None = None
    control_port: int = 0
    data_port: int = 0
    transport: str = AUTO
    lease_seconds: float = 30.0
    parked_seconds: float = 30.0
    peer_timeout_seconds: float = 3.0
    read_timeout_seconds: float = 10.0
    max_frame_bytes: int = 16 * 2**20
    max_staging_bytes: int = DEFAULT_STAGING_BYTES
    num_layer_groups: int = 4
    shm_dir: Path | None = None
    local: LocalHub | None = None
    decorate: Callable[[ReceiverTransport], ReceiverTransport] | None = None

    def __post_init__(self) -> None:
        """Check every range."""
        self._check_numbers()
        for name in ("worker_id", "boot_id", "secret", "host"):
            if not getattr(self, name):
                raise SettingError(f"{name} is empty; it must not be", param=name)
        if self.host in ("0.0.0.0", "::") and self.advertise_host is None:
            raise SettingError(
                f"host is {self.host}, which nobody can dial; set advertise_host too", param="advertise_host"
            )
        if self.role is Role.ROUTER:
            raise SettingError("role is router; a router moves no KV", param="role")
        self._check_transport()

    def _check_numbers(self) -> None:
        for name in ("control_port", "data_port"):
            port = getattr(self, name)
            if not 0 <= port <= 65535:
                raise SettingError(f"{name} is {port}; it must lie in 0..65535", param=name)
        for name in ("lease_seconds", "parked_seconds", "peer_timeout_seconds", "read_timeout_seconds"):
            if getattr(self, name) <= 0:
                raise SettingError(f"{name} is {getattr(self, name)}; it must be above 0", param=name)
        for name, low in (("max_frame_bytes", 65536), ("max_staging_bytes", 1)):
            if getattr(self, name) < low:
                raise SettingError(f"{name} is {getattr(self, name)}; it must be {low} or more", param=name)

    def _check_transport(self) -> None:
        names = (AUTO, *transport_names())
        if self.transport not in names:
            raise SettingError(
                f"transport is {self.transport!r}; choose one of {', '.join(names)}", param="transport"
            )
        if (self.transport == "local") != (self.local is not None):
            raise SettingError("transport local and the hub in local come together", param="local")
        missing = why_missing() if self.transport == "nixl" else None
        if missing is not None:
            raise SettingError(missing, param="transport")
        why_not = why_unsupported() if self.transport == "shm" else None
        if why_not is not None:
            raise SettingError(
                f"transport shm is not possible here: {why_not}; choose auto or tcp", param="transport"
            )
