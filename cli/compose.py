"""``kvbaton compose``: writes a Docker Compose file for this machine, from docker/compose.yaml.jinja."""

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined

from autoscaler.running import configured_policy
from autoscaler.timing_model import read_timing
from contract.errors import SettingError
from contract.identity import Role
from launch.arguments import parse, to_arguments
from launch.machine_settings import WAKE_SECONDS, ComposeSettings
from launch.memory_plan import weight_bytes
from launch.model import find_model
from launch.settings import DEMO

ROOT = Path(__file__).resolve().parent.parent
_TEMPLATE = ROOT / "docker" / "compose.yaml.jinja"
_SOCKET = Path("/var/run/docker.sock")
_PATH = re.compile(r"[\w./+@,=-]+")
"""Paths that neither YAML nor Compose reads as something else."""
_LAW = ("budget", "scaling_interval_seconds", "shrink_after_seconds")
"""Settings that only the autoscaler reads."""


def compose(arguments: Sequence[str]) -> None:
    """Run ``kvbaton compose``."""
    settings = parse(ComposeSettings, "kvbaton compose", arguments)
    if settings.autoscale:
        # What the autoscaler would refuse is refused now, and not in a container that Compose starts again and again.
        if settings.timing is not None:
            read_timing(settings.timing)
        least = {Role.PREFILL: settings.least_prefill, Role.DECODE: settings.least_decode}
        most = {f"max_{role.value}": len(places) for role, places in settings.places().items()}
        configured_policy(settings.model_copy(update=most), least, dict.fromkeys(least, settings.ranks))
    text = compose_text(settings)
    if settings.output.exists() and not settings.overwrite:
        raise SettingError(f"output {settings.output} exists; add --overwrite to replace it", param="output")
    settings.output.write_text(text)
    profile = "gpu" if settings.prefill_devices else "cpu"
    print(f"{settings.output} is written. Start it with")
    print(f"  COMPOSE_PROFILES={profile} docker compose -f {settings.output} up -d --build --wait")


class GpuWorker(NamedTuple):
    """A worker's service. place: its number, or a variable with a default."""

    service: str
    role: str
    place: str


class Scaling(NamedTuple):
    """The autoscaler's service. flags: of its command. timing: path of the timing file, if any. places: by role, on GPUs.

    group: that of the engine's socket on this machine.
    """

    flags: list[str]
    timing: str | None
    places: dict[str, str]
    group: int


def compose_text(settings: ComposeSettings) -> str:
    """Return the text of the file.

    Raises SettingError without a checkout to build from, and for a model folder that containers cannot read.
    """
    if not _TEMPLATE.is_file():
        raise SettingError(f"the images are built from a checkout of the repository, and {ROOT} is none")
    environment = Environment(
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # it is no HTML; ``_checked`` refuses paths that YAML or Compose would read as something else
    )
    template = environment.from_string(_TEMPLATE.read_text())
    places = settings.places()
    model = None if settings.model == DEMO else _model_folder(settings.model)
    return template.render(
        flags="".join(f" {flag}" for flag in _flags(settings)),
        root=_relative(ROOT, settings.output),
        docker=_relative(_TEMPLATE.parent, settings.output),
        model=model,
        ranks=settings.ranks,
        num_workers=sum(map(len, places.values())),
        replicas={"prefill": max(1, settings.least_prefill), "decode": max(1, settings.least_decode)},
        wake_seconds=WAKE_SECONDS if settings.may_be_empty else None,
        gpu_workers=[
            worker
            for role, taken in places.items()
            # With autoscaling a role begins with one worker, of which the autoscaler makes copies on the other places.
            for worker in _gpu_workers(role.value, taken[:1] if settings.autoscale else taken)
        ],
        goals={name: getattr(settings, name) for name in _changed(settings, ("ttft_goal_ms", "itl_goal_ms"))},
        scaling=_scaling(settings, places) if settings.autoscale else None,
    )


def _scaling(settings: ComposeSettings, places: dict[Role, list[int]]) -> Scaling:
    """Return what the template needs of an autoscaler. Raises SettingError for a timing file that containers cannot read."""
    least = {Role.PREFILL: settings.least_prefill, Role.DECODE: settings.least_decode}
    flags = [f"--{role.value}={least[role]}:{len(taken)}" for role, taken in places.items()]
    given = [f"--{name.replace('_', '-')}={getattr(settings, name)}" for name in _changed(settings, _LAW)]
    if settings.timing is None:
        given.append(f"--weight-bytes={weight_bytes(find_model(settings.model))}")
        if settings.prefill_devices:
            given.append("--has-gpu")
    return Scaling(
        flags=[*flags, *given],
        timing=_checked(str(settings.timing.resolve()), "timing") if settings.timing else None,
        places={role.value: ",".join(map(str, taken)) for role, taken in places.items()},
        # The autoscaler runs as user 10001, which may use the engine's socket only through its group.
        group=_SOCKET.stat().st_gid if _SOCKET.is_socket() else 0,
    )


def _gpu_workers(role: str, places: list[int]) -> list[GpuWorker]:
    """Return the services of one role. The place of the first one can be changed by a variable."""
    first, *others = places
    return [
        GpuWorker(f"{role}-gpu", role, f"${{{role.upper()}_GPU:-{first}}}"),
        *(GpuWorker(f"{role}-gpu-{index}", role, str(place)) for index, place in enumerate(others, 2)),
    ]


def _flags(settings: ComposeSettings) -> list[str]:
    """Return the flags that the file depends on, where they are not the defaults."""
    names = (
        "autoscale",
        "prefill",
        "max_prefill",
        "decode",
        "max_decode",
        "prefill_devices",
        "decode_devices",
    )
    more = ("tensor_parallel_size", "data_parallel_size", "timing", "ttft_goal_ms", "itl_goal_ms", "model")
    given = {name: getattr(settings, name) for name in _changed(settings, (*names, *_LAW, *more))}
    return [shlex.quote(word) for word in to_arguments(given)]


def _changed(settings: ComposeSettings, names: Iterable[str]) -> list[str]:
    """Return those of the settings that do not have their default."""
    fields = type(settings).model_fields
    return [name for name in names if getattr(settings, name) != fields[name].default]


def _relative(path: Path, output: Path) -> str:
    """Return a path as seen from the folder of the file, in the form that Compose takes for one."""
    relative = os.path.relpath(path, output.resolve().parent)
    return _checked(relative if relative.startswith(".") else f"./{relative}", "output")


def _model_folder(model: str) -> str:
    """Return the absolute path of a model's folder, which is mounted alone."""
    folder = find_model(model)
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and not path.resolve().is_relative_to(folder):
            raise SettingError(
                f"model is {model!r}: {path} is a link to another folder, which a container does not see; copy the files"
                " (cp -rL)",
                param="model",
            )
    return _checked(str(folder), "model")


def _checked(path: str, param: str) -> str:
    if not _PATH.fullmatch(path):
        raise SettingError(
            f"{param}: the path {path} cannot be written to a Compose file; use letters, digits and ./+@,=-_",
            param=param,
        )
    return path
