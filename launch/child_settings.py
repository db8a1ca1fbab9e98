"""Selects what a settings file gives to each process that ``up`` and the library start.

The file is read once, by ``up``. For a process of role R the first of these that gives a setting wins: a flag or a
variable of ``up``, the table [R], ``up``'s own table, the top of the file. What R has and ``up`` has not (advertise_host,
max_queue, ...) comes from [R] or the top. It travels in the child's environment, below the variables that are there
already, so the order flag > environment > file holds in the child too, and a secret is in no argv.
"""

import logging
from collections.abc import Mapping
from typing import Any

from contract.errors import SettingError
from contract.identity import Role
from launch.command_settings import setting_names
from launch.settings import LocalSettings, variable
from serving.settings import FLAG
from serving.settings_file import Given, is_secret

logger = logging.getLogger(__name__)

_SHARED = frozenset({"model", "served_model_name", "secret_file"})
"""Settings that all processes of one service must agree on."""
_OWN_OF_WORKERS = frozenset({"router", "admin", "worker_id", "workers_on_host"})
"""Settings that ``up`` decides for each worker: there may be several on this machine."""


def from_file(settings: LocalSettings, role: Role) -> dict[str, Any]:
    """Return what the file gives to the processes of a role beyond ``settings`` themselves; empty without a file.

    Raises SettingError where it contradicts ``settings``; logs what is not used.
    """
    file = settings.sources.file
    if file is None:
        return {}
    names = setting_names(role.value)
    found = {}
    for name, given in file.given(role.value, names).items():
        if _is_said_by(settings, name, given):
            continue
        if name in _SHARED or is_secret(name):
            _refuse_contradiction(settings, name, given)
        elif name in _OWN_OF_WORKERS and role is not Role.ROUTER:
            logger.warning("%s: %s is not used: it is decided for each worker here", given.place, name)
        else:
            found[name] = given.value
    if found:
        told = " ".join(f"{name}={value!r}" for name, value in found.items())
        logger.info("%s gives %s processes: %s", file.path, role.value, told)
    return found


def _is_said_by(settings: LocalSettings, name: str, given: Given) -> bool:
    """Return whether ``settings`` win over the file: they were given more closely, or are the same line."""
    if name not in type(settings).model_fields:
        return False
    origin = settings.sources.origins.get(name)
    return not given.is_in_table or origin in (FLAG, variable(name))


def _refuse_contradiction(settings: LocalSettings, name: str, given: Given) -> None:
    if is_secret(name):
        raise SettingError(
            f"{given.place}: {name} cannot be handed to several processes; give secret_file instead",
            param=name,
        )
    own: Mapping[str, Any] = settings.model_dump(mode="json")
    if given.value != own[name]:
        raise SettingError(
            f"{given.place}: {name} is {given.value!r}, but this service has {own[name]!r}, and all its processes"
            " share one: leave out either",
            param=name,
        )
