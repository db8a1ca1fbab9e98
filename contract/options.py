"""Groups of settings. Each setting is declared once, with its default, its range and its help.

A process's settings, the settings of ``kvbaton up`` and what an engine or a connector receives inherit the same groups. So a
new setting is one edit: its flag, variable, TOML key, help text and row in docs/settings.md follow from the declaration.
"""

from collections.abc import Mapping
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

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
    """What one part of a process receives. Raises SettingError with the name, the value and the allowed range."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _as_setting_error(type(self).model_fields, error) from error

    def changed(self, **values: Any) -> Self:
        """Return a copy with other values. Raises SettingError."""
        return type(self)(**{**self.values_in(self), **values})


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


def _as_setting_error(fields: Mapping[str, FieldInfo], error: ValidationError) -> SettingError:
    first, *_ = error.errors(include_url=False)
    reason = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return SettingError(reason, param=_named_in(reason, fields))
    name = str(first["loc"][0])
    field = fields.get(name)
    shown = repr(first["input"]) if field is None or field.repr else "***"
    return SettingError(f"{name} is {shown}: {reason}{allowed(field)}", param=name)


def _named_in(reason: str, fields: Mapping[str, FieldInfo]) -> str | None:
    """Return the setting that a check of several settings names first."""
    return next((word for word in reason.replace(":", " ").split() if word in fields), None)
