"""The groups of a connector's settings (see ``contract.options``). Imports nothing that moves KV."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from contract.identity import Role
from contract.options import Options, PartSettings, PeerOptions

TransportName = Literal["auto", "shm", "nixl", "nccl", "tcp"]
"""A transport that crosses processes. ``auto``: the best that both workers of a pair support."""


class TransferOptions(Options):
    """The transport of KV, and the lease on it."""

    transport: TransportName = "auto"
    """Transport of KV blocks: shm (workers on one machine), nixl, nccl, tcp, or auto, the best that both workers support."""
    shm_dir: Path | None = None
    """Folder of the sockets of transport shm; containers share it as a volume. Unset: a new private folder in /tmp."""
    lease_seconds: float = Field(default=30.0, gt=0)
    """Seconds that computed KV stays lent to a decode worker from which nothing is received."""


Host = Annotated[str, AfterValidator(lambda host: host.strip("[]"))]
"""A host name or an IP address; brackets around one of IPv6 are removed."""


class PortOptions(Options):
    """The addresses at which other workers reach a worker."""

    host: Host = Field(default="127.0.0.1", min_length=1)
    """Interface to which the worker's internal ports are bound; other workers and the router must be able to reach it."""
    advertise_host: Host | None = None
    """Host name or address that the router and other workers connect to; required if host is a wildcard such as 0.0.0.0."""
    control_port: int = Field(default=0, ge=0, le=65535)
    """Port of the control link to other workers; 0 picks a free one."""
    data_port: int = Field(default=0, ge=0, le=65535)
    """Port of the KV data that other workers fetch by transport tcp, nixl or nccl; 0 picks a free one. Each further rank
    uses the next port."""


class BootSettings(PortOptions, PartSettings):
    """One start of a worker, and where it is reached."""

    boot_id: str = Field(min_length=1)
    """Identifies one start of the worker."""


class LinkSettings(BootSettings, PeerOptions):
    """The settings of a worker's control links, and what the worker introduces itself by."""

    worker_id: str = Field(min_length=1)
    """The worker's name in the cluster."""
    role: Role
    """The worker's role, which is not that of a router."""
    secret: str = Field(min_length=1, repr=False)
    """The cluster's secret."""
    max_frame_bytes: int = Field(default=16 * 2**20, ge=65536)
    """The longest message on a control link."""
