"""The settings of a connector, in groups; see ``contract.options``. Imports no transport."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from contract.options import Options

TransportName = Literal["auto", "shm", "nixl", "nccl", "tcp"]
"""A transport that crosses processes. ``auto``: the best that both workers of a pair support."""


class TransferOptions(Options):
    """The settings of transfers and leases."""

    transport: TransportName = "auto"
    """Transport of KV blocks: shm (workers on one machine), nixl, nccl, tcp; auto: the best that both workers support."""
    shm_dir: Path | None = None
    """Folder of the sockets of transport shm; containers share it as a volume. Unset: a new private folder in /tmp."""
    lease_seconds: float = Field(default=30.0, gt=0)
    """Time after which the lease on a prompt's KV expires if the decode worker does not renew it."""


class PortOptions(Options):
    """The settings of a worker's internal ports."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Interface to which the worker's internal ports are bound; other workers and the router must be able to reach it."""
    advertise_host: str | None = None
    """Host name or address that the router and other workers connect to; required if host is a wildcard such as 0.0.0.0."""
    control_port: int = Field(default=0, ge=0, le=65535)
    """Port of the control link to other workers; 0 picks a free one."""
    data_port: int = Field(default=0, ge=0, le=65535)
    """Port of the KV data that other workers fetch by transport tcp, nixl or nccl; 0 picks a free one. Each further rank
    uses the next port."""
