"""Groups of settings. Each setting is declared once, with its default, range and help text.

The settings of a process, of ``kvbaton up``, of an engine and of a connector inherit the same groups. A new setting is
therefore one edit: its flag, variable, TOML key, help text and row in docs/settings.md are derived from the declaration.
"""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from contract.errors import SettingError

MAX_SECONDS = 10_000_000
"""The longest time of any setting; clocks, locks and libraries fail with much longer ones."""
_BOUNDS = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))


class Options(BaseModel):
    """A group of settings. Subclasses add fields with ranges; the docstring of a field is its help text."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True
    )

    @field_validator("*", mode="after")
    @classmethod
    def _check_time(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject a time that is too long for a clock: it would fail where it is first used."""
        is_time = (info.field_name or "").endswith("_seconds") and isinstance(value, float)
        if is_time and not value <= MAX_SECONDS:
            raise ValueError(f"it must be {MAX_SECONDS} or less")
        return value

    @classmethod
    def names(cls) -> frozenset[str]:
        """Return the names of the group's settings."""
        return frozenset(cls.model_fields)

    @classmethod
    def values_in(cls, settings: BaseModel) -> dict[str, Any]:
        """Return this group's values in settings that contain the group."""
        return {name: getattr(settings, name) for name in cls.model_fields}


class PeerOptions(Options):
    """The settings that decide when another process counts as dead."""

    peer_timeout_seconds: float = Field(default=3.0, gt=0)
    """Silence after which the worker at the other end of a control link counts as dead. An engine counts as stopped when it
    got no CPU time for as long."""


class DrainOptions(Options):
    """The settings of the planned end of a process."""

    drain_seconds: float = Field(default=30.0, ge=0)
    """Time for running requests after SIGTERM or Ctrl-C. Those of a worker continue on other workers then; those of a router
    end with an error. A second signal: at once."""


class PartSettings(Options):
    """The settings of one part of a process. Raises SettingError with the name, the value and the allowed range.

    A check of several settings raises SettingError itself and names the wrong one.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0])
            field = type(self).model_fields.get(name)
            is_secret = field is not None and not field.repr
            raise SettingError(describe(first, field, is_secret=is_secret), param=name) from error


def bounds(field: FieldInfo) -> list[str]:
    """Return the range of a number, as ["at least 0", "at most 64"]."""
    return [
        f"{word} {bound}"
        for part in field.metadata
        for attribute, word in _BOUNDS
        if (bound := getattr(part, attribute, None)) is not None
    ]


def allowed(field: FieldInfo | None) -> str:
    """Return the range of a field, as ", allowed: at least 0, at most 64"; empty if it has none."""
    if field is None:
        return ""
    choices = [value for value in get_args(field.annotation) if isinstance(value, str)]
    listed = ", ".join(bounds(field) or choices)
    return f", allowed: {listed}" if listed else ""


def describe(problem: ErrorDetails, field: FieldInfo | None, *, is_secret: bool) -> str:
    """Return the problem of one value, as "NAME is VALUE: REASON, allowed: RANGE"; a secret is not shown."""
    name = str(problem["loc"][0])
    if problem["type"] == "missing":
        return f"{name} is not set"
    value = "***" if is_secret else repr(problem["input"])
    return f"{name} is {value}: {reason_of(problem)}{allowed(field)}"


def reason_of(problem: ErrorDetails) -> str:
    """Return why one value or a combination of values was rejected."""
    return problem["msg"].removeprefix("Value error, ")
