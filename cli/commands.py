"""The commands of ``kvbaton``: where each one lives, what it does, which settings it has."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from serving.settings import Settings

NEVER_IN_A_FILE = frozenset({"config", "ready_fd", "parent_pid"})
"""Settings that a file cannot give: where the file is, and what ``up`` tells its children."""


@dataclass(frozen=True)
class Command:
    """One command. function, settings: "module:name", imported when they are needed. group: its heading in the help."""

    function: str
    settings: str
    group: str
    summary: str

    def run(self, arguments: Sequence[str]) -> None:
        """Run it to its end."""
        function: Callable[[Sequence[str]], None] = _imported(self.function)
        function(arguments)

    def settings_class(self) -> type[Settings]:
        """The class of its settings."""
        found: type[Settings] = _imported(self.settings)
        return found


_MACHINE = "one machine"
_ASK = "ask a model"
_SERVICE = "one process, for clusters and containers"

COMMANDS = {
    "up": Command(
        "cli.up:up", "cli.settings:UpSettings", _MACHINE, "start a router and its workers on this machine"
    ),
    "serve": Command(
        "cli.up:serve", "cli.settings:ServeSettings", _MACHINE, "serve one model by one aggregated worker"
    ),
    "demo": Command(
        "cli.demo:demo", "cli.settings:DemoSettings", _MACHINE, "show the relay on the demo model"
    ),
    "chat": Command("cli.chat:chat", "cli.settings:ChatSettings", _ASK, "chat in the terminal"),
    "run": Command("cli.run:run", "cli.settings:RunSettings", _ASK, "answer one prompt and end"),
    "batch": Command(
        "cli.batch:batch",
        "cli.settings:BatchSettings",
        _ASK,
        "answer a file of requests, in OpenAI's batch format",
    ),
    "check": Command(
        "cli.check:check",
        "cli.settings:CheckSettings",
        _ASK,
        "say what a model folder is, and what its chat template can show",
    ),
    "router": Command("cli.router:router", "cli.router:RouterCommand", _SERVICE, "start one router"),
    "prefill": Command(
        "cli.workers:prefill", "cli.workers:PrefillCommand", _SERVICE, "start one prefill worker"
    ),
    "decode": Command("cli.workers:decode", "cli.workers:DecodeCommand", _SERVICE, "start one decode worker"),
    "both": Command("cli.workers:both", "cli.workers:BothCommand", _SERVICE, "start one aggregated worker"),
}
"""Command by name, in the order of the help."""


def setting_names(command: str) -> frozenset[str]:
    """The names of a command's settings that may stand in a file."""
    return command_setting_names(command) - NEVER_IN_A_FILE


def command_setting_names(command: str) -> frozenset[str]:
    """Return the names of all of a command's settings."""
    return frozenset(COMMANDS[command].settings_class().model_fields)


def all_setting_names() -> dict[str, frozenset[str]]:
    """``setting_names`` of every command."""
    return {command: setting_names(command) for command in COMMANDS}


def _imported(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
