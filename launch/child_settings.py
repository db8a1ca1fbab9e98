"""Selects the settings that a settings file gives to each process of ``up`` and the library.

The file is read once, by ``up``. For a process of role R the first of these that gives a setting wins: a flag or a
variable of ``up``, the table [R], ``up``'s own table, the top of the file. What R has and ``up`` has not (advertise_host,
max_queue, ...) comes from [R] or the top. It is passed in the child's environment, below the variables that are already
set, so the order flag > environment > file holds in the child too, and no secret is in an argv.
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
"""Settings that ``up`` sets for each worker: there may be several on this machine."""


def from_file(settings: LocalSettings, role: Role, *, is_logged: bool = True) -> dict[str, Any]:
    """Return the file's settings for the processes of a role that ``settings`` do not include; empty without a file.

    is_logged: log them, and settings that are not used. Raises SettingError if the file contradicts ``settings``.
    """
    file = settings.sources.file
    if file is None:
        return {}
    names = setting_names(role.value)
    found = {}
    for name, given in file.given(role.value, names).items():
        if _is_overridden(settings, name, given):
            continue
        if name in _SHARED or is_secret(name):
            _refuse_contradiction(settings, name, given)
        elif name in _OWN_OF_WORKERS and role is not Role.ROUTER:
            if is_logged:
                logger.warning("%s: %s is not used: it is set here for each worker", given.place, name)
        else:
            found[name] = given.value
    if found and is_logged:
        shown = " ".join(f"{name}={value!r}" for name, value in found.items())
        logger.info("%s gives %s processes: %s", file.path, role.value, shown)
    return found


def _is_overridden(settings: LocalSettings, name: str, given: Given) -> bool:
    """Return whether ``settings`` take precedence over this line of the file, or come from the same line."""
    if name not in type(settings).model_fields:
        return False
    origin = settings.sources.origins.get(name)
    return not given.is_in_table or origin in (FLAG, variable(name))


def _refuse_contradiction(settings: LocalSettings, name: str, given: Given) -> None:
    if is_secret(name):
        raise SettingError(
            f"{given.place}: {name} cannot be passed to several processes; use secret_file instead",
            param=name,
        )
    own: Mapping[str, Any] = settings.model_dump(mode="json")
    if given.value != own[name]:
        raise SettingError(
            f"{given.place}: {name} is {given.value!r}, but this service uses {own[name]!r}, and all its processes"
            " share one value: remove one of the two",
            param=name,
        )
