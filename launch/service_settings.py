"""The settings of the commands that run one process: ``kvbaton router``, ``prefill``, ``decode``, ``both``, ``autoscaler``.

The model of a router or a worker may be the demo model or a Hugging Face id.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from engine.options import RankOptions
from launch.machine_settings import ScalingSettings
from launch.model import model_folder, with_served_name
from launch.settings import DEMO, CommandSettings, ServiceSettings
from router.settings import RouterSettings
from serving.http_hosts import HostNameOptions
from serving.settings import Address, ListenAddress
from worker.settings import WorkerSettings


class AutoscalerCommand(HostNameOptions, RankOptions, ScalingSettings, CommandSettings):
    """Scale the workers of a Docker Compose project: start and remove their containers as the load changes.

    It copies the containers of the services that have the label kvbaton.role, so each role needs one container at least.
    `kvbaton compose --autoscale` writes a file with such services and with this command. A process that can use
    the engine's socket can become root on the machine; so this is a service of its own, without ports for clients.

    Example: kvbaton autoscaler --prefill 1:2 --decode 1:6 --project kvbaton --router-admin router:9101
    """

    prefill: Annotated[int, Field(ge=0, le=64)] = 1
    """Least number of prefill workers; 1:4 stands for least and greatest."""
    decode: Annotated[int, Field(ge=0, le=64)] = 1
    """Least number of decode workers; 1:4 stands for least and greatest."""
    weight_bytes: int = Field(default=0, ge=0)
    """Bytes of the model's weights, from which its times are guessed at first if there is no timing file; 0: not known."""
    has_gpu: bool = False
    """Guess the times of workers on GPUs."""
    launcher: str = "docker"
    """Name of the launcher, which starts and removes workers: "docker"."""
    project: str = "kvbaton"
    """Name of the Compose project."""
    docker_socket: Path = Path("/var/run/docker.sock")
    """Unix socket of the Docker engine."""
    router_admin: Address = "127.0.0.1:9101"
    """HOST:PORT of the routers' admin ports; a name is resolved again and again, and may stand for several routers."""
    admin_key: str | None = Field(default=None, repr=False)
    """Admin key of the routers. Not accepted as a flag, which other users of this machine can see."""
    admin_keys_file: Path | None = None
    """File with the admin keys of the routers, the first of which is used if admin_key is unset."""
    admin: ListenAddress = "127.0.0.1:9102"
    """HOST:PORT of /health and /debug/state."""


class RouterCommand(ServiceSettings, RouterSettings):
    """Start one router, which serves the public APIs and selects the workers of each request.

    Workers register at --internal with the secret of --secret-file. It needs neither torch nor a GPU.

    Example: kvbaton router --secret-file secret --internal 0.0.0.0:9100
    """

    internal: ListenAddress = "127.0.0.1:9100"
    """HOST:PORT at which workers register; they need the cluster secret."""
    model: Annotated[Path | None, BeforeValidator(model_folder)] = None
    """Folder or Hugging Face id of the model, "demo" for the demo model; unset: fetched from the first worker."""

    @model_validator(mode="before")
    @classmethod
    def _name_the_model(cls, values: dict[str, Any]) -> dict[str, Any]:
        return with_served_name(values, None)


class WorkerCommand(ServiceSettings, WorkerSettings):
    """The settings of a worker whose model may be the demo model or a Hugging Face id."""

    model: Annotated[Path, BeforeValidator(model_folder)] = Field(default=Path(DEMO), validate_default=True)
    """Folder or Hugging Face id of the model; "demo" is the small model in the package."""

    @model_validator(mode="before")
    @classmethod
    def _name_the_model(cls, values: dict[str, Any]) -> dict[str, Any]:
        return with_served_name(values, DEMO)


class PrefillCommand(WorkerCommand):
    """Start one prefill worker, which computes prompts and hands over their KV to decode workers.

    Example: kvbaton prefill --model demo --router 127.0.0.1:9100 --secret-file secret
    """


class DecodeCommand(WorkerCommand):
    """Start one decode worker, which fetches the KV of prompts and generates the tokens.

    Example: kvbaton decode --model demo --router 127.0.0.1:9100 --secret-file secret
    """


class BothCommand(WorkerCommand):
    """Start one aggregated worker, which computes prompts and decodes them itself.

    Example: kvbaton both --model demo --router 127.0.0.1:9100 --secret-file secret
    """
