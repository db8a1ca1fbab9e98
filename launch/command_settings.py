"""The settings class of every command, by the command's name, and what a settings file gives to each process.

A file and the environment hold the settings of all commands: to distinguish a typo from a setting of another command,
each command and the library need the names of all settings. A class is imported only when it is needed.

The file is read once, by ``up``. For a process of role R the first of these that gives a setting wins: a flag or a
variable of ``up``, the table [R], ``up``'s own table, the top of the file. What R has and ``up`` has not (advertise_host,
max_queue, ...) comes from [R] or the top (``from_file``). It is passed in the child's environment, below the variables that
are already set, so the order flag > environment > file holds in the child too, and no secret is in an argv.
"""

import logging
from importlib import import_module
from typing import Any

from contract.errors import SettingError
from contract.identity import Role
from launch.settings import LocalSettings, variable
from serving.settings import FLAG, Settings
from serving.settings_file import is_secret

logger = logging.getLogger(__name__)

_SHARED = frozenset({"model", "served_model_name", "secret_file"})
"""Settings that all processes of one service must agree on."""
_OWN_OF_WORKERS = frozenset({"router", "admin", "worker_id", "workers_on_host"})
"""Settings that ``up`` sets for each worker: there may be several on this machine."""
NEVER_IN_A_FILE = frozenset({"config", "ready_fd", "parent_pid", "num_restarts"})
"""Settings that a file cannot hold: its own path, and the flags that ``up`` passes to its children."""
_PLACES = {
    "up": "launch.machine_settings:UpSettings",
    "serve": "launch.machine_settings:ServeSettings",
    "demo": "launch.machine_settings:DemoSettings",
    "chat": "launch.client_settings:ChatSettings",
    "run": "launch.client_settings:RunSettings",
    "batch": "launch.client_settings:BatchSettings",
    "bench": "launch.client_settings:BenchSettings",
    "check": "launch.client_settings:CheckSettings",
    "compose": "launch.machine_settings:ComposeSettings",
    "workers": "launch.client_settings:WorkersSettings",
    "top": "launch.client_settings:TopSettings",
    "router": "launch.service_settings:RouterCommand",
    "prefill": "launch.service_settings:PrefillCommand",
    "decode": "launch.service_settings:DecodeCommand",
    "both": "launch.service_settings:BothCommand",
    "autoscaler": "launch.service_settings:AutoscalerCommand",
}


def settings_class(command: str) -> type[Settings]:
    """Return the class of a command's settings."""
    module, _, name = _PLACES[command].partition(":")
    found: type[Settings] = getattr(import_module(module), name)
    return found


def setting_names(command: str) -> frozenset[str]:
    """Return the names of a command's settings that a file may hold."""
    return command_setting_names(command) - NEVER_IN_A_FILE


def command_setting_names(command: str) -> frozenset[str]:
    """Return the names of all of a command's settings."""
    return frozenset(settings_class(command).model_fields)


def all_setting_names() -> dict[str, frozenset[str]]:
    """Return ``setting_names`` of every command."""
    return {command: setting_names(command) for command in _PLACES}


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
        origin = settings.sources.origins.get(name)
        # ``settings`` take precedence over this line of the file, or come from the same line.
        if name in type(settings).model_fields and (
            not given.is_in_table or origin in (FLAG, variable(name))
        ):
            continue
        if is_secret(name):
            raise SettingError(
                f"{given.place}: {name} cannot be passed to several processes; use secret_file instead",
                param=name,
            )
        if name in _SHARED:
            own = settings.model_dump(mode="json")[name]
            if given.value != own:
                raise SettingError(
                    f"{given.place}: {name} is {given.value!r}, but this service uses {own!r}, and all its processes"
                    " share one value: remove one of the two",
                    param=name,
                )
        elif name in _OWN_OF_WORKERS and role is not Role.ROUTER:
            if is_logged:
                logger.warning("%s: %s is not used: it is set here for each worker", given.place, name)
        else:
            found[name] = given.value
    if found and is_logged:
        shown = " ".join(f"{name}={value!r}" for name, value in found.items())
        logger.info("%s gives %s processes: %s", file.path, role.value, shown)
    return found
