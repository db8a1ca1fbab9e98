"""Write docs/settings.md from the settings classes of all commands, or check that the committed page is in sync."""

import sys
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from cli.main import COMMANDS
from contract.options import bounds
from launch.arguments import is_hidden, is_positional
from launch.command_settings import NEVER_IN_A_FILE, settings_class
from serving.settings_file import is_secret
from tools.generated_files import write_or_check

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
_HEAD = """# Settings

<!-- Written by `make settings-docs` from the settings classes; change those, not this page. -->

Every setting has one name in three places: `--max-num-seqs 64` on the command line,
`KVBATON_MAX_NUM_SEQS=64` in the environment, `max_num_seqs = 64` in a TOML file. **The flag takes
precedence over the variable, the variable over the file, the file over the default.** Settings are
read once, when a process starts, and logged with their sources; secrets are masked. An unknown
name, a value out of range or a contradiction stops the process.

The name of a flag may have underscores too: `--max_num_seqs 64`, `--no_pin_cores`.

## The file

`--config FILE` or `KVBATON_CONFIG=FILE` names it; there is no default file.
[examples/kvbaton.toml](../examples/kvbaton.toml) is a complete one.

- A key at the top applies to every command that has such a setting.
- A table named after a command (`[router]`, `[prefill]`, `[up]`, ...) applies to that command only,
  and takes precedence over the top.
- An unknown key stops every command that reads the file, even if it is in another command's table.
- `prefill`, `decode` and `both` are tables, and also numbers of workers for `up`: write the numbers
  into `[up]`.
- A secret is accepted only in a file that no other user can read (`chmod 600`). No secret is
  accepted as a flag: other users of the machine can see it.
- The file cannot contain `config`.

## `up` and its processes

`kvbaton up` (and `serve`, `demo`, and `run`, `chat` and `batch` without `--url`) reads the file
once, and passes to each of its processes the settings that it needs. For a worker of role
`decode`, the first of these that contains a setting is used:

1. a flag of `up`,
2. a variable of the environment, which its processes inherit,
3. the table `[decode]`,
4. the table `[up]`,
5. the top of the file,
6. the default.

So `[decode] max_num_seqs = 256` changes the decode workers of `up`, and `max_queue = 64` at the top
reaches its router though `up` has no such flag. Settings that `up` chooses for each worker
(`router`, `admin`, `worker_id`, `workers_on_host`) are not read from the file, which is logged; a
`model`, `served_model_name` or `secret_file` that differs from `up`'s own is rejected.

## All settings

A name has several rows where its default or meaning differs among commands. *local*: the commands
that start a service on this machine, which are `up`, `serve`, `demo`, `chat`, `run`, `batch` and
`bench`; *worker*: `prefill`, `decode` and `both`. `kvbaton COMMAND --help` lists the settings of
one command.

| name | commands | type and range | default | meaning |
| --- | --- | --- | --- | --- |
"""
_LOCAL = ("up", "serve", "demo", "chat", "run", "batch", "bench")
_WORKERS = ("prefill", "decode", "both")


def render() -> str:
    """Return the whole page."""
    commands: dict[tuple[str, ...], list[str]] = {}
    for command in COMMANDS:
        for name, field in settings_class(command).model_fields.items():
            if not is_hidden(field):
                commands.setdefault(_cells(name, field), []).append(command)
    # Commands may differ in a default or in what a setting means for them: those rows stand below each other.
    rows = sorted(commands.items(), key=lambda item: item[0][0].split("`")[1])
    return _HEAD + "".join(f"| {' | '.join(_row(cells, names))} |\n" for cells, names in rows)


def _row(cells: tuple[str, ...], commands: list[str]) -> list[str]:
    (name, *others) = cells
    return [name, _names(commands), *others]


def _names(commands: list[str]) -> str:
    """Return a short list of commands."""
    if len(commands) == len(COMMANDS):
        return "all"
    words = []
    for group, members in (("local", _LOCAL), ("worker", _WORKERS)):
        if set(members) <= set(commands):
            words.append(f"*{group}*")
            commands = [command for command in commands if command not in members]
    return ", ".join([*words, *(f"`{command}`" for command in commands)])


def _cells(name: str, field: FieldInfo) -> tuple[str, ...]:
    remarks = {
        f"as {name.upper()}": is_positional(field),
        "no flag": is_secret(name),
        "not in a file": name in NEVER_IN_A_FILE,
    }
    remark = ", ".join(text for text, is_so in remarks.items() if is_so)
    shown = f"`{name}`" + (f" ({remark})" if remark else "")
    meaning = (field.description or "").replace("|", "\\|").replace("\n", " ")
    return (shown, _type(field), _default(field), meaning)


def _type(field: FieldInfo) -> str:
    (annotation, *_) = [part for part in _options(field.annotation) if part is not NoneType]
    return ", ".join([_word(annotation), *bounds(field)])


def _options(annotation: Any) -> tuple[Any, ...]:
    is_choice = get_origin(annotation) is Literal or not get_args(annotation)
    return (annotation,) if is_choice else get_args(annotation)


def _word(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(f"`{value}`" for value in get_args(annotation))
    words = {int: "integer", float: "number", bool: "switch", str: "text", Path: "path"}
    inner = get_args(annotation)
    return words.get(annotation) or (words.get(inner[0]) if inner else None) or str(annotation)


def _default(field: FieldInfo) -> str:
    if field.is_required() or field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return "unset"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def main(arguments: list[str], page: Path = PAGE) -> int:
    """Write the page, or with ``--check`` only compare."""
    complaint = f"docs/{page.name} is out of sync with the settings: run `make settings-docs`"
    return write_or_check({page: render()}, arguments, complaint)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
