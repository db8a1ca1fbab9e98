"""One TOML file for the settings of every command.

Keys at the top apply to every command that has such a setting; a table named after a command applies to that command
only, and takes precedence over the top:

    max_num_seqs = 64

    [decode]
    max_num_seqs = 256

The file is read once, with the standard library's parser, which pydantic-settings uses too: unknown keys and secrets in a
file that others can read are rejected before any value is used.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contract.errors import SettingError

TOP = ""
"""The name of the top level of a file, beside the names of its tables."""


def is_secret(name: str) -> bool:
    """Return True if the value of a setting must not be shown; the path of a file with a secret may be."""
    return any(word in name for word in ("secret", "password", "api_key", "admin_key")) and not name.endswith(
        "_file"
    )


def nearest(name: str, names: Collection[str]) -> str:
    """Return the most similar name, as " (did you mean NAME?)"; empty if none is similar."""
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" (did you mean {found[0]}?)" if found else ""


@dataclass(frozen=True)
class Given:
    """A value of a file, and its place as text: FILE:LINE, with the table's name if it is in one."""

    value: Any = field(repr=False)
    place: str
    is_in_table: bool


@dataclass(frozen=True)
class SettingsFile:
    """A checked file; made by ``read_settings_file``. tables: by command, the top level as ``TOP``."""

    path: Path
    tables: Mapping[str, Mapping[str, Any]] = field(repr=False)
    lines: Mapping[tuple[str, str], int] = field(repr=False)

    def given(self, command: str, names: Collection[str]) -> dict[str, Given]:
        """Return the file's values for a command that has the settings ``names``."""
        found = {}
        for table in (TOP, command):
            for name, value in self.tables.get(table, {}).items():
                if name in names:
                    found[name] = Given(value, self.place(table, name), is_in_table=table != TOP)
        return found

    def place(self, table: str, name: str = "") -> str:
        """Return the place of a key (or a table): FILE:LINE [TABLE]."""
        line = self.lines.get((table, name))
        return f"{self.path}{f':{line}' if line else ''}{f' [{table}]' if table else ''}"


def read_settings_file(path: Path, commands: Mapping[str, Collection[str]]) -> SettingsFile:
    """Read and check a file. commands: the names of the settings that it may contain, by command.

    Raises SettingError with path and line if it cannot be read or is not TOML, if a key is not a setting of the command
    (or of any command, at the top), or if it contains a secret and other users may read it.
    """
    text, mode = _read(path)
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # The words of the standard parser for a name that is both a value and a table.
        is_double = re.search("twice|overwrite|Cannot", str(error))
        hint = "; a name is either a value or a table, so put the numbers of workers for up into [up]"
        raise SettingError(
            f"{path} is not valid TOML: {error}{hint if is_double else ''}", param="config"
        ) from error
    tables: dict[str, Mapping[str, Any]] = {
        name: value for name, value in content.items() if isinstance(value, dict)
    }
    tables[TOP] = {name: value for name, value in content.items() if name not in tables}
    file = SettingsFile(path, tables, _lines(text))
    _check_names(file, commands)
    for table, values in file.tables.items():
        for name in filter(is_secret, values):
            if mode & 0o077:
                raise SettingError(
                    f"{file.place(table, name)}: {name} is a secret, but the file's mode is {mode & 0o777:04o}:"
                    f" `chmod 600 {file.path}`, or put the secret into a file of its own",
                    param=name,
                )
    return file


def _read(path: Path) -> tuple[str, int]:
    try:
        with path.expanduser().open("rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            data = stream.read()
    except OSError as error:
        raise SettingError(
            f"config {path} cannot be read: {error.strerror or error}", param="config"
        ) from error
    try:
        return data.decode(), mode
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SettingError(
            f"{path}:{line} is not valid TOML: its bytes are not UTF-8 ({error.reason})", param="config"
        ) from error


def _lines(text: str) -> dict[tuple[str, str], int]:
    """Return the lines of tables and simply written keys; errors about other keys have no line number."""
    found: dict[tuple[str, str], int] = {}
    table = TOP
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\s*[\"']?([\w.-]+)[\"']?\s*\]", line):
            table = header[1]
            found.setdefault((table, ""), number)
        elif key := re.match(r"\s*[\"']?([\w-]+)[\"']?\s*[=.]", line):
            found.setdefault((table, key[1]), number)
    return found


def _check_names(file: SettingsFile, commands: Mapping[str, Collection[str]]) -> None:
    every = {name for names in commands.values() for name in names}
    for table, values in file.tables.items():
        if table not in commands and table != TOP:
            hint = nearest(table, commands) or f"; tables are {', '.join(commands)}"
            raise SettingError(f"{file.place(table)}: unknown command {table!r}{hint}", param=table)
        allowed = every if table == TOP else commands[table]
        for name in values:
            if name not in allowed:
                owner = "any command" if table == TOP else table
                others = [command for command, names in commands.items() if name in names]
                hint = f" (it is one of {', '.join(others)})" if others else nearest(name, allowed)
                raise SettingError(
                    f"{file.place(table, name)}: {name!r} is not a setting of {owner}{hint}", param=name
                )
