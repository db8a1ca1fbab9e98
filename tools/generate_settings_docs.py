"""Write docs/settings.md from the settings classes of all commands, or check that the committed page is in sync."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from cli.commands import COMMANDS, Command
from contract.options import bounds
from launch.arguments import is_hidden, is_positional
from launch.command_settings import NEVER_IN_A_FILE, settings_class
from launch.settings import variable
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
"""


def render() -> str:
    """Return the whole page."""
    sections = ("\n".join(_section(name, command)) for name, command in COMMANDS.items())
    return "\n".join([_HEAD, *sections])


def _section(name: str, command: Command) -> Iterator[str]:
    yield f"## `kvbaton {name}`"
    yield ""
    yield f"{command.summary[0].upper()}{command.summary[1:]}."
    yield ""
    yield "| name | flag | environment | type and range | default | meaning |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for setting, field in settings_class(name).model_fields.items():
        if not is_hidden(field):
            yield _row(setting, field)
    yield ""


def _row(name: str, field: FieldInfo) -> str:
    flag = name.upper() if is_positional(field) else f"--{name.replace('_', '-')}"
    shown = f"`{name}`" if name not in NEVER_IN_A_FILE else f"`{name}` (not in a file)"
    meaning = (field.description or "").replace("|", "\\|").replace("\n", " ")
    cells = [
        shown,
        "–" if is_secret(name) else f"`{flag}`",
        f"`{variable(name)}`",
        _type(field),
        _default(field),
        meaning,
    ]
    return f"| {' | '.join(cells)} |"


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
