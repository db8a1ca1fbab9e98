"""The ``kvbaton`` command: runs one of ``COMMANDS``, and turns its errors into one line and an exit code.

Exit codes: 0 success, or a service that a signal has stopped, 1 an error, 2 a bad command line or setting. A command with a
result that SIGINT or SIGTERM ends before it has one: 130 or 143, as in a shell.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from itertools import groupby

from cli.terminal import printable
from contract.errors import KvbatonError, SettingError
from serving.settings_file import nearest
from serving.signals import STOP_SIGNALS, Terminated, raising

_MACHINE = "one machine"
_ASK = "use a model"
_OPERATE = "operate a running service"
_SERVICE = "one process, for clusters and containers"
_ABOUT = "kvbaton: an LLM server that separates prefill from decode and hands over the KV cache between them"
_MORE = """`kvbaton COMMAND --help` lists a command's settings with their defaults. Each is a flag (--max-num-seqs), an
environment variable (KVBATON_MAX_NUM_SEQS) and a key of the TOML file of --config (max_num_seqs): the flag wins over the
variable, the variable over the file. `kvbaton up` without settings serves the demo model at http://127.0.0.1:8000/v1.

  --version  print the version"""


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
        # This block covers the imports only: if native code drops the exception of a signal, the block raises it after them.
        with raising(*STOP_SIGNALS):
            function: Callable[[Sequence[str]], None] = getattr(import_module(module), name)
        function(arguments)


COMMANDS = {
    "up": Command("cli.up:up", _MACHINE, "start a router and its workers on this machine", is_service=True),
    "serve": Command("cli.up:serve", _MACHINE, "serve one model by one aggregated worker", is_service=True),
    "demo": Command("cli.demo:demo", _MACHINE, "show a hand-over on the demo model", is_service=True),
    "chat": Command("cli.chat:chat", _ASK, "chat in the terminal"),
    "run": Command("cli.run:run", _ASK, "answer one prompt and exit"),
    "batch": Command("cli.batch:run_batch", _ASK, "answer a file of requests, in OpenAI's batch format"),
    "bench": Command("cli.bench:bench", _ASK, "measure a service, and write its timing model"),
    "check": Command("cli.check:check", _ASK, "describe a model folder and test its chat template"),
    "compose": Command("cli.compose:compose", _MACHINE, "write a Docker Compose file for this machine"),
    "workers": Command("cli.operate:workers", _OPERATE, "list the workers, or drain or flip one"),
    "top": Command("cli.operate:top", _OPERATE, "show the workers live", is_service=True),
    "router": Command("cli.service:router", _SERVICE, "start one router", is_service=True),
    "prefill": Command("cli.service:prefill", _SERVICE, "start one prefill worker", is_service=True),
    "decode": Command("cli.service:decode", _SERVICE, "start one decode worker", is_service=True),
    "both": Command("cli.service:both", _SERVICE, "start one aggregated worker", is_service=True),
    "autoscaler": Command(
        "autoscaler.service:autoscaler", _SERVICE, "scale the workers of a Compose project", is_service=True
    ),
}
"""Command by name, in the order of the help."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the installed command. arguments: None takes those of this process."""
    code = run_command(sys.argv[1:] if arguments is None else arguments)
    # A KeyboardInterrupt inside exec() of a text, as dataclasses do while they are imported, leaves a mark in CPython:
    # `python -m` would end by SIGINT instead of with this code, though it was caught. The next text that is run removes it.
    exec("")
    sys.exit(code)


def run_command(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    # Otherwise each text on which the tokenizers' library panics could write a whole backtrace to stderr.
    os.putenv("RUST_BACKTRACE", "0")
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", ())
    if name == "help" and rest:
        name, rest = rest[0], [*rest[1:], "--help"]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"kvbaton {version('kvbaton')}")
        return 0
    try:
        if name not in COMMANDS:
            raise SettingError(
                f"unknown command {name!r}{nearest(name, COMMANDS)}; choose one of {', '.join(COMMANDS)}"
            )
        with raising(signal.SIGTERM):
            COMMANDS[name].run(rest)
    except KeyboardInterrupt as error:
        number = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
        return 0 if COMMANDS[name].is_service else 128 + number
    except SettingError as error:
        print(printable(f"kvbaton: {error.message}", sys.stderr), file=sys.stderr)
        return 2
    except KvbatonError as error:
        print(printable(f"kvbaton: {error.message}", sys.stderr), file=sys.stderr)
        return 1
    return 0


def usage() -> str:
    """Return the text of ``kvbaton --help``: the commands by group."""
    lines = [_ABOUT, "", "usage: kvbaton COMMAND [--flag VALUE ...]", ""]
    for group, commands in groupby(COMMANDS.items(), lambda item: item[1].group):
        lines += [f"{group}:", *(f"  {name:<9} {command.summary}" for name, command in commands), ""]
    return "\n".join([*lines, _MORE])


if __name__ == "__main__":
    main()
