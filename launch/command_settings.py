"""The settings class of every command, by the command's name.

A file and the environment hold the settings of all commands: to distinguish a typo from a setting of another command,
each command and the library need the names of all settings. A class is imported only when it is needed.
"""

from importlib import import_module

from serving.settings import Settings

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
    "compose": "launch.compose_settings:ComposeSettings",
    "workers": "launch.operator_settings:WorkersSettings",
    "top": "launch.operator_settings:TopSettings",
    "router": "launch.router_settings:RouterCommand",
    "prefill": "launch.worker_settings:PrefillCommand",
    "decode": "launch.worker_settings:DecodeCommand",
    "both": "launch.worker_settings:BothCommand",
    "autoscaler": "launch.autoscaler_settings:AutoscalerCommand",
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
