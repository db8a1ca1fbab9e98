"""The settings of a connector, and the worker that it is made for."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from pydantic import Field, model_validator

from contract.errors import SettingError
from contract.identity import Role
from contract.layout import Side
from kv_transfer.counters import Completions, Counters
from kv_transfer.options import LinkSettings
from kv_transfer.transports.nixl.agent import why_missing
from kv_transfer.transports.shm.sender import check_supported
from kv_transfer.transports.transport import ReceiverTransport, TransportSettings

DEFAULT_STAGING_BYTES = 16 * 2**20


class TransferSettings(TransportSettings, LinkSettings):
    """Settings of one worker's connector. Raises SettingError with the name, the value and the allowed range."""

    parked_seconds: float = Field(default=30.0, gt=0)
    """Seconds that a fetch waits for a transfer that is not open yet."""
    max_parked: int = Field(default=1024, ge=1)
    """Fetches of one peer that may wait for transfers that are not open yet."""
    max_staging_bytes: int = Field(default=DEFAULT_STAGING_BYTES, ge=1)
    """Memory, on the pool's device, for blocks of one peer that must be converted, unless one block of ours needs more."""
    num_layer_groups: int = Field(default=4, ge=1)
    """Number of parts in which a long prompt's last blocks are lent, as their layers are computed; 1 is as a whole."""
    min_split_blocks: int = Field(default=8, ge=1)
    """Number of last blocks from which on they are lent in parts."""
    decorate: Callable[[ReceiverTransport], ReceiverTransport] | None = None
    """Wraps the receiver (fault injection in tests)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.host in ("0.0.0.0", "::") and self.advertise_host is None:
            raise SettingError(
                f"host is {self.host}, an address that no peer can dial; set advertise_host too", param="host"
            )
        if self.role is Role.ROUTER:
            raise SettingError("role is router; a router moves no KV", param="role")
        if self.transport == "nixl" and (missing := why_missing()):
            raise SettingError(missing, param="transport")
        if self.transport == "shm":
            check_supported()
        return self


@dataclass
class LocalWorker:
    """The worker that a connector is made for, and what the connector's parts share. wake: has the engine look for work.

    model_fingerprint: changes when the weights are reloaded; nothing is lent or fetched then.
    """

    settings: TransferSettings
    side: Side
    model_fingerprint: str
    wake: Callable[[], None]
    counters: Counters = field(default_factory=Counters)
    completions: Completions = field(default_factory=Completions)

    @property
    def is_single_rank(self) -> bool:
        """Only a single rank lends, and reads, the layers of blocks before these are whole."""
        return self.side.num_ranks == 1
