"""The text of a Docker Compose file for one machine, from docker/compose.yaml.jinja."""

import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined

from contract.errors import SettingError
from contract.identity import Role
from launch.compose_settings import ComposeSettings
from launch.model import find_model
from launch.settings import DEMO

ROOT = Path(__file__).resolve().parent.parent
_TEMPLATE = ROOT / "docker" / "compose.yaml.jinja"
_PATH = re.compile(r"[\w./+@,=-]+")
"""Paths that neither YAML nor Compose reads as something else."""


class GpuWorker(NamedTuple):
    """A worker's service. place: its number, or a variable with a default."""

    service: str
    role: str
    place: str


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
        autoescape=False,
    )
    template = environment.from_string(_TEMPLATE.read_text())
    places = settings.places()
    model = None if settings.model == DEMO else _model_folder(settings.model)
    return template.render(
        flags="".join(f" {flag}" for flag in _flags(settings)),
        root=_relative(ROOT, settings.output),
        docker=_relative(_TEMPLATE.parent, settings.output),
        model=model,
        ranks=settings.tensor_parallel_size,
        prefill=places[Role.PREFILL],
        decode=places[Role.DECODE],
        gpu_workers=[worker for role, taken in places.items() for worker in _gpu_workers(role.value, taken)],
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
    names = ("prefill", "decode", "prefill_devices", "decode_devices", "tensor_parallel_size", "model")
    defaults = {name: type(settings).model_fields[name].default for name in names}
    values = {name: getattr(settings, name) for name in names}
    given = {name: value for name, value in values.items() if value != defaults[name]}
    return [f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in given.items()]


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
