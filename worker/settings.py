"""The settings of one worker process, and the parts that its engine and its connector use."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from contract.identity import Role
from data_parallel.options import GroupPlan
from engine.options import EngineOptions, HostOptions
from engine.settings import EngineSettings
from kv_transfer.options import PortOptions, TransferOptions
from serving.admin_access import AdminKeyOptions
from serving.http_hosts import HostNameOptions
from serving.metrics import MetricsOptions
from serving.settings import Address, Addresses, ListenAddress, ProcessSettings, listed, read_secret_file
from worker.cores import parse_cores
from worker.options import WorkerOptions

if TYPE_CHECKING:
    from kv_transfer.settings import TransferSettings


class PlaceSettings(HostNameOptions, AdminKeyOptions, ProcessSettings):
    """The settings that identify a worker and its addresses."""

    model: Path
    """Folder of the Hugging Face checkpoint."""
    router: Addresses = "127.0.0.1:9100"
    """HOST:PORT of the routers' internal ports, separated by commas. The worker registers at every address that a name has
    and resolves the names again every 2 seconds."""
    secret_file: Path | None = None
    """File with the cluster secret (mode 0600)."""
    worker_id: str | None = None
    """Name of this worker, unique in the cluster; unset: made from its role and a random id."""
    served_model_name: str | None = None
    """Model name for clients; unset: the folder's name."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the worker's gRPC service; 0 picks a free one."""
    admin: ListenAddress = "127.0.0.1:0"
    """HOST:PORT of /health, /ready, /metrics and /debug/state."""


class WorkerSettings(WorkerOptions, HostOptions, PortOptions, MetricsOptions, PlaceSettings):
    """The settings of one prefill, decode or aggregated worker."""

    cores: str | None = None
    """Cores that the worker's processes are bound to, as in 0-3,8; each compute thread gets one of them. Unset: all."""
    nice: int = Field(default=0, ge=0, le=19)
    """Niceness (nice(1)) of the worker: the higher, the more CPU time other processes on the same cores get."""

    data_parallel_rank: int | None = Field(default=None, ge=0)
    """Number of this worker in its group, from 0, if its ranks are started one by one; unset: all are started here."""
    data_parallel_address: Address | None = None
    """HOST:PORT of the group's coordinator, which rank 0 serves; required with data_parallel_rank."""

    @model_validator(mode="after")
    def _check_group(self) -> Self:
        rank = self.data_parallel_rank
        if rank is None:
            return self
        if rank >= self.data_parallel_size:
            raise ValueError(
                f"data_parallel_rank is {rank}: it must be below data_parallel_size ({self.data_parallel_size})"
            )
        if self.data_parallel_size > 1 and self.data_parallel_address is None:
            raise ValueError(
                "data_parallel_rank is set: set data_parallel_address to where rank 0 is reached, too"
            )
        return self

    @model_validator(mode="after")
    def _check_advertise_host(self) -> Self:
        if self.host in ("0.0.0.0", "::", "") and not self.advertise_host:
            raise ValueError(
                f"host is {self.host!r}: set advertise_host to a name that other workers can connect to"
            )
        return self

    @model_validator(mode="after")
    def _check_cores(self) -> Self:
        num_cores = len(self.core_numbers)
        if self.cores is not None and num_cores < self.num_threads:
            raise ValueError(
                f"cores is {self.cores!r}, which is {num_cores} for num_threads {self.num_threads}: list more cores"
            )
        return self

    @model_validator(mode="after")
    def _check_lease(self) -> Self:
        if self.lease_seconds < self.peer_timeout_seconds:
            raise ValueError(
                f"lease_seconds is {self.lease_seconds}: it must be peer_timeout_seconds"
                f" ({self.peer_timeout_seconds}) or more, else leases expire between two renewals"
            )
        return self

    @property
    def routers(self) -> tuple[str, ...]:
        """``router`` as a tuple."""
        return listed(self.router)

    @property
    def core_numbers(self) -> tuple[int, ...]:
        """The cores to run on; empty: all."""
        return () if self.cores is None else parse_cores(self.cores)

    def read_secret(self) -> str:
        """Return the cluster secret. Raises SettingError if there is none."""
        return read_secret_file(self.secret_file)

    def engine_settings(self) -> EngineSettings:
        """Return the engine's settings."""
        options = EngineOptions.values_in(self)
        # Workers of one service have the same settings, and a folder serves one engine.
        if self.disk_kv_dir is not None and self.worker_id:
            options["disk_kv_dir"] = self.disk_kv_dir / self.worker_id.replace("/", "_")
        return EngineSettings(
            **options,
            **HostOptions.values_in(self),
            model=self.model,
            device=self.device,
            cores=self.core_numbers,
        )

    def group(self) -> GroupPlan | None:
        """Return this worker's place in its data-parallel group; None if it has no group."""
        if self.data_parallel_size == 1 or self.data_parallel_address is None:
            return None
        return GroupPlan(
            dp_rank=self.data_parallel_rank or 0,
            dp_size=self.data_parallel_size,
            address=self.data_parallel_address,
            listen_host=self.host,
            host=self.advertise_host or self.host,
            secret=self.read_secret(),
            look_ahead=self.data_parallel_look_ahead,
            timeout_seconds=self.data_parallel_timeout_seconds,
        )

    def transfer(self, role: Role, worker_id: str, boot_id: str) -> "TransferSettings":
        """Return the connector's settings."""
        # Imported here: it needs numpy, and commands without workers read the names of all settings.
        from kv_transfer.settings import TransferSettings

        return TransferSettings(
            **TransferOptions.values_in(self),
            **PortOptions.values_in(self),
            worker_id=worker_id,
            boot_id=boot_id,
            role=role,
            secret=self.read_secret(),
            parked_seconds=self.remote_kv_timeout_seconds,
            peer_timeout_seconds=self.peer_timeout_seconds,
        )


def visible_gpus() -> str | None:
    """Return the list of GPUs that CUDA shows to processes started here; None: all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")
