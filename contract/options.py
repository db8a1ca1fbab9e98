"""Groups of settings. Each setting is declared once, with its default, its range and its help.

A process's settings, the settings of ``kvbaton up`` and what an engine or a connector receives inherit the same groups. So a
new setting is one edit: its flag, variable, TOML key, help text and row in docs/settings.md follow from the declaration.
"""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from contract.errors import SettingError

MAX_SECONDS = 10_000_000
"""The longest time of any setting: no clock, lock or library takes much more."""
_BOUNDS = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))


class Options(BaseModel):
    """A group of settings. Subclasses add fields with descriptions and ranges; the text below a field is its help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True
    )

    @field_validator("*", mode="after")
    @classmethod
    def _check_time(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a time that no clock can wait for: it would end the first thing that waits for it."""
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
    """When another process counts as dead."""

    peer_timeout_seconds: float = Field(default=3.0, gt=0)
    """Silence on the control link after which the other worker counts as dead. The worker's own engine counts as stopped
    when it has had no time on a processor for so long."""


class PartSettings(Options):
    """What one part of a process receives. Raises SettingError with the name, the value and the allowed range.

    A check of several settings raises SettingError itself, with the one that is to blame.
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
    """Return what a field accepts, as ", allowed: at least 0, at most 64"; empty where it has no range."""
    if field is None:
        return ""
    choices = [value for value in get_args(field.annotation) if isinstance(value, str)]
    listed = ", ".join(bounds(field) or choices)
    return f", allowed: {listed}" if listed else ""


def describe(problem: ErrorDetails, field: FieldInfo | None, *, is_secret: bool) -> str:
    """Return what is wrong with one value, as "NAME is VALUE: REASON, allowed: RANGE"; a secret is not shown."""
    name = str(problem["loc"][0])
    if problem["type"] == "missing":
        return f"{name} is not set"
    value = "***" if is_secret else repr(problem["input"])
    return f"{name} is {value}: {reason_of(problem)}{allowed(field)}"


def reason_of(problem: ErrorDetails) -> str:
    """Return why a value, or several together, were refused."""
    return problem["msg"].removeprefix("Value error, ")
