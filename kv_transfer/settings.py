"""What a connector is made with, checked when it is made."""

from collections.abc import Callable
from typing import Self

from pydantic import Field, model_validator

from contract.errors import SettingError
from contract.identity import Role
from contract.options import PartSettings, PeerOptions
from kv_transfer.data.staging import DEFAULT_STAGING_BYTES
from kv_transfer.options import PortOptions, TransferOptions
from kv_transfer.transports.local import LocalHub
from kv_transfer.transports.nixl.agent import why_missing
from kv_transfer.transports.shm.folder import why_unsupported
from kv_transfer.transports.transport import ReceiverTransport

LOCAL = "local"
"""The transport between connectors of one process, which only tests use."""


class TransferSettings(TransferOptions, PortOptions, PeerOptions, PartSettings):
    """How one worker hands KV over. Raises SettingError with the name, the value and the allowed range."""

    worker_id: str = Field(min_length=1)
    """The worker's name in the cluster."""
    boot_id: str = Field(min_length=1)
    """Another one at each start of the worker."""
    role: Role
    """What the worker does: a router moves no KV."""
    secret: str = Field(min_length=1, repr=False)
    """The cluster's secret."""
    parked_seconds: float = Field(default=30.0, gt=0)
    """How long a fetch waits for a transfer that is not known yet."""
    read_timeout_seconds: float = Field(default=10.0, gt=0)
    """A data connection that moves no byte for so long fails its transfer."""
    max_frame_bytes: int = Field(default=16 * 2**20, ge=65536)
    """The longest message on a control link."""
    max_staging_bytes: int = Field(default=DEFAULT_STAGING_BYTES, ge=1)
    """Host memory for blocks of one peer that must be converted, unless one block of ours needs more."""
    num_layer_groups: int = Field(default=4, ge=1)
    """In how many parts the last blocks of a long prompt are lent, as their layers are computed; 1 is as a whole."""
    local: LocalHub | None = None
    """Where transports of one process meet; None: ``transport`` says what is used."""
    decorate: Callable[[ReceiverTransport], ReceiverTransport] | None = None
    """Wraps the receiver (fault injection in tests)."""

    @property
    def transport_name(self) -> str:
        """The transport to open: ``local`` where there is a hub for it."""
        return LOCAL if self.local is not None else self.transport

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.host in ("0.0.0.0", "::") and self.advertise_host is None:
            raise SettingError(
                f"host is {self.host}, an address that no peer can dial; set advertise_host too", param="host"
            )
        if self.role is Role.ROUTER:
            raise SettingError("role is router; a router moves no KV", param="role")
        missing = why_missing() if self.transport == "nixl" else None
        if missing is not None:
            raise SettingError(missing, param="transport")
        why_not = why_unsupported() if self.transport == "shm" else None
        if why_not is not None:
            raise SettingError(
                f"transport shm is not possible here: {why_not}; choose auto or tcp", param="transport"
            )
        return self
