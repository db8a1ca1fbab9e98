"""Finds the folder of a model: a local folder, the demo model in the package, or a Hugging Face id."""

import re
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from contract.errors import SettingError
from contract.identity import Role
from launch.download import from_hub
from launch.settings import DEMO, LocalSettings

DEMO_NAME = "kvbaton-demo"
_WORKERS = (Role.PREFILL, Role.DECODE, Role.AGGREGATED)
_OF_THE_MODEL = (
    "dtype",
    "kv_cache_dtype",
    "max_model_len",
    "tensor_parallel_size",
    "data_parallel_size",
)
"""Settings that decide whether a model is served."""
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")


def demo_model_folder() -> Path:
    """Return the folder of the demo model in the installed package."""
    return Path(str(files("kvbaton") / "demo_model"))


def model_name(model: str) -> str:
    """Return the default name under which a model is served."""
    if model == DEMO:
        return DEMO_NAME
    return Path(model).resolve().name if Path(model).is_dir() else model


def with_served_name(values: dict[str, Any], default_model: str | None) -> dict[str, Any]:
    """Add ``served_model_name`` to unchecked settings if it is unset and the model is given."""
    model = values.get("model") or default_model
    if values.get("served_model_name") is not None or model is None:
        return values
    return {**values, "served_model_name": model_name(str(model))}


def find_model(model: str) -> Path:
    """Return the folder of ``model``. A Hugging Face id is looked up in the local cache, then downloaded.

    An exception that a signal raises ends a download, so call it outside of an event loop, in the main thread.
    Raises SettingError with the places that were searched.
    """
    folder = demo_model_folder() if model == DEMO else Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise SettingError(f"model is {model!r}: {folder} contains no config.json", param="model")
        return folder.resolve()
    if model == DEMO:
        raise SettingError(
            f"model is {model!r}, but this installation has no demo model at {folder}", param="model"
        )
    if not _HUB_ID.match(model):
        raise SettingError(
            f"model is {model!r}: neither an existing folder nor a Hugging Face id", param="model"
        )
    return from_hub(model)


def check_model(settings: LocalSettings, folder: Path) -> None:
    """Raise the SettingError with which a worker would refuse a model, before any is started.

    Each role's own settings in the file count. It takes about a second at most, since no weights are read. Without an engine
    on this machine nothing is checked.
    """
    if find_spec("safetensors") is None:
        return
    # Imported here: a router's installation has no engine, and settings of commands import this module.
    from engine.models.served import examine
    from engine.settings import EngineSettings
    from launch.command_settings import from_file

    checked = list[EngineSettings]()
    for role, count in zip(_WORKERS, settings.largest_pools, strict=True):
        given = from_file(settings, role, is_logged=False) if count else {}
        options = {name: given.get(name, getattr(settings, name)) for name in _OF_THE_MODEL}
        engine = EngineSettings(model=folder, **options)
        if count and engine not in checked:
            checked.append(engine)
            served = examine(
                folder,
                engine.dtype,
                engine.max_model_len,
                engine.tensor_parallel_size,
                engine.kv_cache_dtype,
                engine.data_parallel_size,
            )
            if not served.has_weights:
                raise SettingError(f"model: {folder} has no weights (*.safetensors)", param="model")


def model_folder(model: object) -> object:
    """Return the folder of a ``model`` setting, as a pydantic validator; None stays None. Raises ValueError."""
    try:
        return find_model(str(model)) if model is not None else None
    except SettingError as error:
        # The validator's caller begins with the name and the value, as this message does.
        raise ValueError(error.message.removeprefix(f"model is {str(model)!r}: ")) from error
