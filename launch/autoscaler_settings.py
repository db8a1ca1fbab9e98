"""The settings of ``kvbaton autoscaler``."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from engine.options import RankOptions
from launch.scaling_settings import ScalingSettings
from launch.settings import CommandSettings
from serving.http_hosts import HostNameOptions
from serving.settings import Address, ListenAddress


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
