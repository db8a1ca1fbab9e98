"""The ``kvbaton`` command: runs a subcommand, and turns its errors into one line and an exit code.

Exit codes: 0 success, or a service that a signal has stopped, 1 an error, 2 a bad command line or setting. A command with a
result that SIGINT or SIGTERM ends before it has one: 130 or 143, as in a shell.
"""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from itertools import groupby

from cli.commands import COMMANDS
from cli.terminal import printable
from contract.errors import KvbatonError, SettingError
from serving.settings_file import nearest
from serving.signals import number_of, raising_sigterm

_ABOUT = "kvbaton: an LLM server that separates prefill from decode and hands over the KV cache between them"
_MORE = """`kvbaton COMMAND --help` lists a command's settings with their defaults. Each is a flag (--max-num-seqs), an
environment variable (KVBATON_MAX_NUM_SEQS) and a key of the TOML file of --config (max_num_seqs): the flag wins over the
variable, the variable over the file. `kvbaton up` without settings serves the demo model at http://127.0.0.1:8000/v1.

  --version  print the version"""


def main() -> None:
    """Run the installed command."""
    code = run_command(sys.argv[1:])
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
        with raising_sigterm():
            COMMANDS[name].run(rest)
    except KeyboardInterrupt as error:
        return 0 if COMMANDS[name].is_service else 128 + number_of(error)
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
