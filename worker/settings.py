"""The settings of one worker process, and the parts of them that its engine and its connector get."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from contract.identity import Role
from engine.options import EngineOptions, HostOptions
from engine.settings import EngineSettings
from kv_transfer.options import PortOptions, TransferOptions
from kv_transfer.settings import TransferSettings
from serving.settings import Address, Settings, read_secret_file
from worker.cores import parse_cores
from worker.options import WorkerOptions


class PlaceSettings(Settings):
    """Which worker it is, and where it is reached."""

    model: Path
    """Folder of the Hugging Face checkpoint."""
    router: Address = "127.0.0.1:9100"
    """HOST:PORT of the router's internal port; the worker registers there."""
    secret_file: Path | None = None
    """File with the cluster secret (mode 0600)."""
    worker_id: str | None = None
    """Name of this worker, unique in the cluster; made from role and process id where unset."""
    served_model_name: str | None = None
    """Name under which clients ask for the model; the folder's name where unset."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the worker's gRPC service; 0 picks a free one."""
    admin: Address = "127.0.0.1:0"
    """HOST:PORT of /health, /ready, /metrics and /debug/state."""


class WorkerSettings(WorkerOptions, HostOptions, PortOptions, PlaceSettings):
    """One prefill, decode or aggregated worker."""

    cores: str | None = None
    """Cores that the worker's processes are kept to, as 0-3,8; each thread that computes has one of them. Unset: any."""
    nice: int = Field(default=0, ge=0, le=19)
    """How far the worker gives way to other processes on the same cores, as nice(1) counts it."""

    @model_validator(mode="after")
    def _check_advertise_host(self) -> Self:
        if self.host in ("0.0.0.0", "::", "") and not self.advertise_host:
            raise ValueError(f"host is {self.host!r}: set advertise_host to the name that others dial")
        return self

    @model_validator(mode="after")
    def _check_cores(self) -> Self:
        num_cores = len(self.core_numbers)
        if self.cores is not None and num_cores < self.num_threads:
            raise ValueError(
                f"cores is {self.cores!r}, {num_cores} for num_threads {self.num_threads}: name more"
            )
        return self

    @model_validator(mode="after")
    def _check_lease(self) -> Self:
        if self.lease_seconds < self.peer_timeout_seconds:
            raise ValueError(
                f"lease_seconds is {self.lease_seconds}: it must be peer_timeout_seconds"
                f" ({self.peer_timeout_seconds}) or more, else leases end between two signs of life"
            )
        return self

    @property
    def core_numbers(self) -> tuple[int, ...]:
        """The cores to run on; empty: any."""
        return () if self.cores is None else parse_cores(self.cores)

    def read_secret(self) -> str:
        """The cluster secret; raises SettingError where there is none."""
        return read_secret_file(self.secret_file)

    def engine(self) -> EngineSettings:
        """The engine's part."""
        return EngineSettings(
            **EngineOptions.values_in(self),
            **HostOptions.values_in(self),
            model=self.model,
            device=self.device,
            cores=self.core_numbers,
        )

    def transfer(self, role: Role, worker_id: str, boot_id: str) -> TransferSettings:
        """The connector's part."""
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
