"""The ``kvbaton`` command: finds the command's module, and turns its errors into one line and an exit code.

Exit codes: 0 stopped as asked, 1 an error, 2 a bad command line or setting.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from contract.errors import KvbatonError, SettingError
from kvbaton import __version__

COMMANDS = {
    "up": ("cli.up", "up", "start a router and its workers on this machine"),
    "serve": ("cli.up", "serve", "serve one model by one aggregated worker"),
    "run": ("cli.run", "run", "answer one prompt and end"),
    "demo": ("cli.demo", "demo", "show the relay on the demo model"),
    "router": ("cli.router", "router", "start one router"),
    "prefill": ("cli.workers", "prefill", "start one prefill worker"),
    "decode": ("cli.workers", "decode", "start one decode worker"),
    "both": ("cli.workers", "both", "start one aggregated worker"),
}
"""Command → its module, its function, and what it does."""


def main() -> None:
    """The entry point of the installed command."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: Sequence[str]) -> int:
    """Run one command; the exit code."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", ())
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"kvbaton {__version__}")
        return 0
    try:
        _command(name)(rest)
    except SettingError as error:
        print(f"kvbaton: {error.message}", file=sys.stderr)
        return 2
    except KvbatonError as error:
        print(f"kvbaton: {error.message}", file=sys.stderr)
        return 1
    return 0


def usage() -> str:
    """What ``kvbaton --help`` prints."""
    lines = [f"  {name:<9} {text}" for name, (_, _, text) in COMMANDS.items()]
    return "\n".join(
        [
            "kvbaton: an LLM server that splits prefill from decode and hands the KV cache over like a baton",
            "",
            "usage: kvbaton COMMAND [--flag VALUE ...]",
            "",
            "commands:",
            *lines,
            "",
            "`kvbaton COMMAND --help` lists a command's settings. Each is a flag (--max-num-seqs) and an environment",
            "variable (KVBATON_MAX_NUM_SEQS); the flag wins. `kvbaton up` without any serves the demo model.",
            "",
            "  --version  print the version",
        ]
    )


def _command(name: str) -> Callable[[Sequence[str]], None]:
    if name not in COMMANDS:
        raise SettingError(f"{name!r} is no command; choose one of {', '.join(COMMANDS)}")
    module, function, _ = COMMANDS[name]
    command: Callable[[Sequence[str]], None] = getattr(import_module(module), function)
    return command


if __name__ == "__main__":
    main()
