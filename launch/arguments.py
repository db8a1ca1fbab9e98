"""Reads one settings object from flags, the environment and a file; an error is one line."""

import argparse
import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import CLI_SUPPRESS, CliApp, CliSettingsSource, EnvSettingsSource, SettingsError

from contract.errors import SettingError
from contract.options import allowed, describe, reason_of
from launch.command_settings import NEVER_IN_A_FILE, all_setting_names, setting_names
from launch.settings import refuse_unknown_variables, variable
from serving.settings import FLAG, Settings, Sources
from serving.settings_file import SettingsFile, is_secret, read_settings_file

S = TypeVar("S", bound=Settings)


class _Parser(argparse.ArgumentParser):
    """Raises SettingError instead of printing the usage and ending the process."""

    def error(self, message: str) -> NoReturn:
        raise SettingError(f"{_without_values(message)} (see {self.prog} --help)")


_UNKNOWN = "unrecognized arguments: "
_DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2212"


def _without_values(message: str) -> str:
    """Return argparse's message without the values of unknown flags: one may be a key after a mistyped name."""
    if not message.startswith(_UNKNOWN):
        return message
    words = message.removeprefix(_UNKNOWN).split(" ")
    if not any(word.startswith(tuple(_DASHES)) for word in words):
        return message
    shown = [_flag_name(word) if word.startswith(tuple(_DASHES)) else "***" for word in words]
    return _UNKNOWN + " ".join(shown)


def _flag_name(word: str) -> str:
    name, equals, _ = word.partition("=")
    return f"{name}=***" if equals else name


def parse(settings_class: type[S], prog: str, arguments: Sequence[str]) -> S:
    """Read settings: flags over environment over file over defaults. ``--help`` prints and ends the process.

    prog: "kvbaton COMMAND".

    Raises SettingError, one line with the names, the values and the allowed ranges of everything that is wrong.
    """
    source = _command_line(settings_class, prog)
    refuse_unknown_variables(
        settings_class.model_fields, lambda: NEVER_IN_A_FILE.union(*all_setting_names().values())
    )
    arguments = [_with_dashes(settings_class, word) for word in arguments]
    command = prog.rpartition(" ")[2]
    origins: dict[str, str] = {}
    try:
        flags = source(args=list(arguments))()
        _refuse_secrets(settings_class, flags)
        variables = EnvSettingsSource(settings_class)()
        file = _file(flags.get("config") or variables.get("config"))
        given = file.given(command, setting_names(command)) if file else {}
        origins |= {name: given[name].place for name in given}
        origins |= {name: variable(name) for name in variables} | dict.fromkeys(flags, FLAG)
        from_file = {name: given[name].value for name in given if origins[name] == given[name].place}
        _refuse_booleans(settings_class, from_file, origins)
        settings = CliApp.run(
            settings_class, cli_args=list(arguments), cli_settings_source=source, **from_file
        )
    except ValidationError as error:
        raise SettingError(_explain(settings_class, error, origins)) from error
    except SettingsError as error:
        raise SettingError(str(error)) from error
    return settings.from_sources(Sources(origins, file))


def _with_dashes(settings_class: type[Settings], word: str) -> str:
    """Return the flag of a setting that is written with underscores, as files and variables have them; else the word."""
    name, equals, value = word.partition("=")
    if (
        not name.startswith("--")
        or name[2:].replace("-", "_").removeprefix("no_") not in settings_class.model_fields
    ):
        return word
    return f"{name.replace('_', '-')}{equals}{value}"


def _command_line(settings_class: type[Settings], prog: str) -> CliSettingsSource[Any]:
    parser = _Parser(
        prog=prog,
        description=inspect.getdoc(settings_class),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=30, width=110
        ),
        allow_abbrev=False,
    )
    return CliSettingsSource[Any](
        settings_class,
        root_parser=parser,
        cli_parse_none_str="unset",
        cli_hide_none_type=True,
        cli_show_env_vars=True,
        cli_exit_on_error=False,
        cli_shortcuts=settings_class.model_config.get("cli_shortcuts"),
    )


def _file(path: str | None) -> SettingsFile | None:
    return read_settings_file(Path(path), all_setting_names()) if path else None


def _refuse_secrets(settings_class: type[Settings], flags: Iterable[str]) -> None:
    """Raise SettingError for a secret on the command line, which every user of the machine can read there."""
    for name in filter(is_secret, flags):
        files = [each for each in (f"{name}_file", f"{name}s_file") if each in settings_class.model_fields]
        other = f"give --{files[0].replace('_', '-')} FILE" if files else "put it into the file of --config"
        raise SettingError(
            f"{name} is given as a flag, which other users of this machine can see: set the variable"
            f" {variable(name)}, or {other}",
            param=name,
        )


def _refuse_booleans(
    settings_class: type[Settings], values: Mapping[str, Any], origins: Mapping[str, str]
) -> None:
    """Raise SettingError for true or false in place of a number or a text: pydantic would take true for 1."""
    for name, value in values.items():
        field = settings_class.model_fields[name]
        if isinstance(value, bool) and field.annotation is not bool:
            raise SettingError(
                f"{name} is {str(value).lower()}: a switch value is not allowed here{allowed(field)} ({origins[name]})",
                param=name,
            )


def to_arguments(values: Mapping[str, Any]) -> list[str]:
    """Return the flags for these settings: None is left out, True is ``--name``, False is ``--no-name``."""
    return [word for name, value in values.items() if value is not None for word in _flag(name, value)]


def _flag(name: str, value: object) -> Iterable[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return (f"--{flag}" if value else f"--no-{flag}",)
    return (f"--{flag}", str(value))


def _explain(settings_class: type[Settings], error: ValidationError, origins: Mapping[str, str]) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        if not problem["loc"]:
            lines.append(reason_of(problem))
            continue
        name = str(problem["loc"][0])
        field = settings_class.model_fields.get(name)
        line = describe(problem, field, is_secret=is_secret(name))
        how = _how_to_set(name, field)
        if problem["type"] == "missing":
            lines.append(f"{line}; give {how}")
            continue
        place = origins.get(name, "")
        lines.append(f"{line} ({how if place in ('', FLAG) else place})")
    return "; ".join(lines)


def _how_to_set(name: str, field: FieldInfo | None) -> str:
    if is_secret(name):
        return variable(name)
    flag = name.upper() if field and is_positional(field) else f"--{name.replace('_', '-')}"
    return f"{flag} or {variable(name)}"


def is_positional(field: FieldInfo) -> bool:
    """Return whether the setting is given without a flag."""
    return any("Positional" in str(part) for part in field.metadata)


def is_hidden(field: FieldInfo) -> bool:
    """Return whether the setting is left out of the help: commands pass it to their children only."""
    return CLI_SUPPRESS in field.metadata
