"""Reads one settings object from flags, the environment and a file; an error is one line."""

import argparse
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
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
from serving.settings_file import is_secret, read_settings_file

S = TypeVar("S", bound=Settings)


class _Parser(argparse.ArgumentParser):
    """Raises SettingError instead of printing the usage and ending the process."""

    def error(self, message: str) -> NoReturn:
        words = message.removeprefix(_UNKNOWN).split(" ")
        dashes = tuple(_DASHES)
        if message.startswith(_UNKNOWN) and any(word.startswith(dashes) for word in words):
            # Without the values of unknown flags: one may be a key after a mistyped name.
            message = _UNKNOWN + " ".join(
                re.sub("=.*", "=***", word, flags=re.DOTALL) if word.startswith(dashes) else "***"
                for word in words
            )
        raise SettingError(f"{message} (see {self.prog} --help)")


_UNKNOWN = "unrecognized arguments: "
_SHORT = {"--json": "--as-json", "--deadline": "--deadline-seconds"}
"""Flags whose names cannot be names of settings, and what they stand for where a command has that setting."""
_END = "--"
"""The word behind which no flag follows: what begins with a dash there is a value, as the prompt of ``run``."""
_DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2212"


def parse(settings_class: type[S], prog: str, arguments: Sequence[str]) -> S:
    """Read settings: flags over environment over file over defaults. ``--help`` prints and ends the process.

    prog: "kvbaton COMMAND", or "kvbaton COMMAND ACTION".

    Raises SettingError, one line with the names, the values and the allowed ranges of everything that is wrong.
    """
    source = _command_line(settings_class, prog)
    refuse_unknown_variables(
        settings_class.model_fields, lambda: NEVER_IN_A_FILE.union(*all_setting_names().values())
    )
    end = arguments.index(_END) if _END in arguments else len(arguments)
    words = arguments[:end]
    # Before the dashes: an error repeats what the user has typed.
    written = _flags_in(settings_class, words)
    _refuse_values_of_switches(settings_class, words)
    arguments = [*(_with_dashes(settings_class, word) for word in words), *arguments[end:]]
    command = prog.split()[1]
    origins: dict[str, str] = {}
    try:
        flags = source(args=list(arguments))()
        _refuse_secrets(settings_class, flags)
        variables = EnvSettingsSource(settings_class)()
        path = flags.get("config") or variables.get("config")
        file = read_settings_file(Path(path), all_setting_names()) if path else None
        given = file.given(command, setting_names(command)) if file else {}
        origins |= {name: given[name].place for name in given}
        origins |= {name: variable(name) for name in variables} | dict.fromkeys(flags, FLAG)
        # Only what nothing else gives: a wrong value in the file that a flag replaces is no error.
        from_file = {name: given[name].value for name in given if origins[name] == given[name].place}
        _refuse_booleans(settings_class, from_file, origins)
        settings = CliApp.run(
            settings_class, cli_args=list(arguments), cli_settings_source=source, **from_file
        )
    except ValidationError as error:
        raise SettingError(_explain(settings_class, error, origins, written)) from error
    except SettingsError as error:
        raise SettingError(str(error)) from error
    except SettingError as error:
        raise SettingError(_with_flag(error.message, error.param, written), param=error.param) from error
    return settings.from_sources(Sources(origins, file))


def _with_dashes(settings_class: type[Settings], word: str) -> str:
    """Return the flag of a setting that is short, or written with underscores as in files and variables; else the word."""
    given, equals, value = word.partition("=")
    name = _SHORT.get(given, given)
    bare = name[2:].replace("-", "_")
    fields = settings_class.model_fields
    switch = fields.get(bare.removeprefix("no_"))
    if not name.startswith("--") or not (bare in fields or (switch and switch.annotation is bool)):
        return word
    return f"{name.replace('_', '-')}{equals}{value}"


def _flags_in(settings_class: type[Settings], arguments: Iterable[str]) -> dict[str, str]:
    """Return the flags by the names of their settings, as they are written: with underscores, or in a short form."""
    shortcuts = settings_class.model_config.get("cli_shortcuts") or {}
    short = {
        one: name for name, ones in shortcuts.items() for one in ([ones] if isinstance(ones, str) else ones)
    }
    found: dict[str, str] = {}
    for word in arguments:
        flag = word.partition("=")[0]
        bare = _SHORT.get(flag, flag).lstrip("-").replace("-", "_")
        for name in (short.get(flag.lstrip("-")), bare, bare.removeprefix("no_")):
            if flag.startswith("-") and name in settings_class.model_fields:
                found.setdefault(name, flag)
    return found


def _refuse_values_of_switches(settings_class: type[Settings], arguments: Sequence[str]) -> None:
    """Raise SettingError for the value of a switch. It is not shown: it may be a key.

    A word behind a switch may also be the argument of a command that has one without a flag.
    """
    has_positional = any(map(is_positional, settings_class.model_fields.values()))
    for word, following in pairwise([*arguments, _END]):
        for name, flag in _flags_in(settings_class, [word]).items():
            is_switch = settings_class.model_fields[name].annotation is bool
            if is_switch and ("=" in word or not (has_positional or following.startswith("-"))):
                raise SettingError(f"{name} is a switch: {flag} takes no value", param=name)


def takes_value(settings_class: type[Settings], word: str) -> bool:
    """Return True for a flag of a setting whose value is the next word."""
    names = _flags_in(settings_class, [word])
    return "=" not in word and any(settings_class.model_fields[name].annotation is not bool for name in names)


def _with_flag(message: str, name: str | None, written: Mapping[str, str]) -> str:
    """Return a message with the flag by which the setting that it is about was given, unless the flag is in it."""
    name = name or message.partition(" ")[0]
    flag = written.get(name)
    if flag is None or re.search(rf"{re.escape(flag)}(?![-\w])", message):
        return message
    return f"{message} ({flag})"


def _command_line(settings_class: type[Settings], prog: str) -> CliSettingsSource[Any]:
    parser = _Parser(
        prog=prog,
        description=inspect.getdoc(settings_class),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=30, width=110
        ),
        allow_abbrev=False,  # else a new setting could change what an old command line means
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
    words = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words


def _explain(
    settings_class: type[Settings],
    error: ValidationError,
    origins: Mapping[str, str],
    written: Mapping[str, str],
) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        if not problem["loc"]:
            lines.append(_with_flag(reason_of(problem), None, written))
            continue
        name = str(problem["loc"][0])
        field = settings_class.model_fields.get(name)
        line = describe(problem, field, is_secret=is_secret(name))
        usual = name.upper() if field and is_positional(field) else f"--{name.replace('_', '-')}"
        # A secret cannot be given as a flag.
        how = variable(name) if is_secret(name) else f"{written.get(name, usual)} or {variable(name)}"
        if problem["type"] == "missing":
            lines.append(f"{line}; give {how}")
            continue
        place = origins.get(name, "")
        lines.append(f"{line} ({how if place in ('', FLAG) else place})")
    return "; ".join(lines)


def is_positional(field: FieldInfo) -> bool:
    """Return whether the setting is given without a flag."""
    return any("Positional" in str(part) for part in field.metadata)


def is_hidden(field: FieldInfo) -> bool:
    """Return whether the setting is left out of the help: commands pass it to their children only."""
    return CLI_SUPPRESS in field.metadata
