"""The NIXL library: where it is found, and how it is loaded without touching this process's logging."""

import importlib
import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contract.errors import SettingError
from kv_transfer.transports.settings import prepare_ucx

_MODULES = ("nixl_cu13._api", "nixl_cu12._api", "nixl._api")
_MISSING = "transport nixl needs the NIXL library: pip install 'kvbaton[nixl]', or choose auto, shm or tcp"


@dataclass(frozen=True)
class NixlLibrary:
    """The loaded library. errors: everything that its calls raise. disconnected: of these, the one of a lost peer."""

    api: Any
    errors: tuple[type[Exception], ...]
    disconnected: type[Exception]


def why_missing(modules: Sequence[str] = _MODULES) -> str | None:
    """What to install, or None where a build of the library is found. Loads nothing."""
    packages = [module.partition(".")[0] for module in modules]
    return None if any(importlib.util.find_spec(package) for package in packages) else _MISSING


def load(host: str, modules: Sequence[str] = _MODULES) -> NixlLibrary:
    """The first build of the library that is installed. Raises SettingError. ``host``: see ``prepare_ucx``."""
    missing = why_missing(modules)
    if missing is not None:
        raise SettingError(missing, param="transport")
    prepare_ucx(host)
    for module in modules:
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            return _described(_import(module))
    raise SettingError(_MISSING, param="transport")


def _import(module: str) -> Any:
    """Import it, and undo what it does to logging: a handler on standard output, and no word about broken handlers."""
    raises = logging.raiseExceptions
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SettingError(
            f"the NIXL library cannot be loaded: {error}; repair it, or choose auto, shm or tcp",
            param="transport",
        ) from error
    finally:
        logging.raiseExceptions = raises
        nixl_logger = logging.getLogger("nixl")
        nixl_logger.handlers.clear()
        nixl_logger.propagate = True
        nixl_logger.setLevel(logging.WARNING)


def _described(api: Any) -> NixlLibrary:
    bindings = api.nixlBind
    errors = [
        getattr(bindings, name)
        for name in dir(bindings)
        if name.startswith("nixl") and name.endswith("Error")
    ]
    return NixlLibrary(api, tuple(errors), bindings.nixlRemoteDisconnectError)
