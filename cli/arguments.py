"""From ``argv`` and the environment to one settings object, with errors of one line."""

import argparse
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import CliApp, CliSettingsSource, SettingsError

from cli.settings import refuse_unknown_variables
from contract.errors import SettingError
from serving.settings import Settings

S = TypeVar("S", bound=Settings)
_BOUNDS = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))


class _Parser(argparse.ArgumentParser):
    """Raises SettingError instead of printing the usage and ending the process."""

    def error(self, message: str) -> NoReturn:
        raise SettingError(f"{message} (see {self.prog} --help)")


def parse(settings_class: type[S], prog: str, arguments: Sequence[str]) -> S:
    """Flags over environment over defaults; ``--help`` prints and ends the process.

    Raises SettingError, one line that holds the names, the values and the allowed ranges of everything wrong.
    """
    parser = _Parser(
        prog=prog,
        description=inspect.getdoc(settings_class),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=30, width=110
        ),
        allow_abbrev=False,
    )
    source = CliSettingsSource[Any](
        settings_class,
        root_parser=parser,
        cli_parse_none_str="unset",
        cli_hide_none_type=True,
        cli_show_env_vars=True,
        cli_exit_on_error=False,
    )
    refuse_unknown_variables(settings_class)
    try:
        return CliApp.run(settings_class, cli_args=list(arguments), cli_settings_source=source)
    except ValidationError as error:
        raise SettingError(_explain(settings_class, error)) from error
    except SettingsError as error:
        raise SettingError(str(error)) from error


def to_arguments(values: Mapping[str, Any]) -> list[str]:
    """The flags that give these settings: None is left out, True is ``--name``, False is ``--no-name``."""
    return [word for name, value in values.items() if value is not None for word in _flag(name, value)]


def _flag(name: str, value: object) -> Iterable[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return (f"--{flag}" if value else f"--no-{flag}",)
    return (f"--{flag}", str(value))


def _explain(settings_class: type[Settings], error: ValidationError) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        name = str(problem["loc"][0]) if problem["loc"] else "settings"
        field = settings_class.model_fields.get(name)
        if problem["type"] == "missing":
            lines.append(f"{name} is not set; give {_how_to_set(name, field)}")
            continue
        reason = problem["msg"].removeprefix("Value error, ")
        lines.append(
            f"{name} is {problem['input']!r}: {reason}{_allowed(field)} ({_how_to_set(name, field)})"
        )
    return "; ".join(lines)


def _how_to_set(name: str, field: FieldInfo | None) -> str:
    positional = field is not None and any("Positional" in str(part) for part in field.metadata)
    flag = name.upper() if positional else f"--{name.replace('_', '-')}"
    return f"{flag} or KVBATON_{name.upper()}"


def _allowed(field: FieldInfo | None) -> str:
    """What the field accepts, as ", allowed: at least 0, at most 64"; empty where it has no range."""
    if field is None:
        return ""
    told = [
        f"{word} {bound}"
        for part in field.metadata
        for attribute, word in _BOUNDS
        if (bound := getattr(part, attribute, None)) is not None
    ]
    choices = [value for value in get_args(field.annotation) if isinstance(value, str)]
    allowed = ", ".join(told or choices)
    return f", allowed: {allowed}" if allowed else ""
