"""The commands of ``kvbaton``, their entry points and summaries."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Command:
    """One command. function: "module:name", imported when the command runs. group: its heading in the help.

    is_service: it runs until a signal stops it, which is its success.
    """

    function: str
    group: str
    summary: str
    is_service: bool = False

    def run(self, arguments: Sequence[str]) -> None:
        """Run the command until it ends."""
        module, _, name = self.function.partition(":")
        function: Callable[[Sequence[str]], None] = getattr(import_module(module), name)
        function(arguments)


_MACHINE = "one machine"
_ASK = "use a model"
_OPERATE = "operate a running service"
_SERVICE = "one process, for clusters and containers"

COMMANDS = {
    "up": Command("cli.up:up", _MACHINE, "start a router and its workers on this machine", is_service=True),
    "serve": Command("cli.up:serve", _MACHINE, "serve one model by one aggregated worker", is_service=True),
    "demo": Command("cli.demo:demo", _MACHINE, "show a hand-over on the demo model", is_service=True),
    "chat": Command("cli.chat:chat", _ASK, "chat in the terminal"),
    "run": Command("cli.run:run", _ASK, "answer one prompt and exit"),
    "batch": Command("cli.batch:batch", _ASK, "answer a file of requests, in OpenAI's batch format"),
    "bench": Command("cli.bench:bench", _ASK, "measure a service, and write its timing model"),
    "check": Command("cli.check:check", _ASK, "describe a model folder and test its chat template"),
    "compose": Command("cli.compose:compose", _MACHINE, "write a Docker Compose file for this machine"),
    "workers": Command("cli.operate:workers", _OPERATE, "list the workers, or drain or flip one"),
    "top": Command("cli.top:top", _OPERATE, "show the workers live", is_service=True),
    "router": Command("cli.router:router", _SERVICE, "start one router", is_service=True),
    "prefill": Command("cli.workers:prefill", _SERVICE, "start one prefill worker", is_service=True),
    "decode": Command("cli.workers:decode", _SERVICE, "start one decode worker", is_service=True),
    "both": Command("cli.workers:both", _SERVICE, "start one aggregated worker", is_service=True),
    "autoscaler": Command(
        "cli.autoscaler:autoscaler", _SERVICE, "scale the workers of a Compose project", is_service=True
    ),
}
"""Command by name, in the order of the help."""
