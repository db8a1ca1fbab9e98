"""Sets of JSON values that schemas describe, and the conversion of bare text to one of these values."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from text.parsing.json_text import decoded

ANY = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
"""All types; "number" excludes integers."""
_SPELLED = {"True": "true", "False": "false", "None": "null"}


MAX_CONSTANTS = 256
"""Limit of listed values; of a longer list only the types are kept, so that sets of many schemas cost little."""


@dataclass(frozen=True)
class Allowed:
    """All values of some types, or only ``constants`` of them (by key) if a schema lists these."""

    types: frozenset[str] = ANY
    constants: Mapping[Any, Any] | None = None

    @property
    def is_text(self) -> bool:
        """True if all values are strings."""
        return self.types == {"string"}

    def both(self, other: "Allowed") -> "Allowed":
        """Return the intersection with another set."""
        types = self.types & other.types
        known = [one for one in (self.constants, other.constants) if one is not None]
        if not known:
            return Allowed(types)
        constants = {key: known[0][key] for key in known[0] if all(key in one for one in known)}
        return one_of(value for value in constants.values() if type_of(value) in types)

    def either(self, other: "Allowed") -> "Allowed":
        """Return the union with another set."""
        types = self.types | other.types
        if self.constants is None or other.constants is None:
            return Allowed(types)
        constants = {**self.constants, **other.constants}
        return Allowed(types, constants if len(constants) <= MAX_CONSTANTS else None)

    def written(self, text: str) -> str:
        """Return the JSON text of the value that ``text`` stands for.

        If several types are possible, the value is a string; if all types are, objects and lists are not strings.
        """
        bare = text.strip()
        bare = _SPELLED.get(bare, bare)
        value = decoded(bare)
        if value is None and bare != "null":
            return quoted(text)
        listed = self.constants or {}
        if key_of(text) not in listed and key_of(value) in listed:
            return bare
        if not self.types or self.types == ANY:
            return bare if isinstance(value, dict | list) else quoted(text)
        is_string = "string" in self.types and (value is not None or "null" not in self.types)
        return quoted(text) if is_string else bare


def type_of(value: Any) -> str:
    """Return the name of a value's type; a number without a fraction is an integer."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def quoted(text: str) -> str:
    """Return the JSON text of a string."""
    return json.dumps(text, ensure_ascii=False)


def one_of(values: Iterable[Any]) -> Allowed:
    """Return the set of the listed values."""
    listed = list(values)
    constants = {key_of(value): value for value in listed} if len(listed) <= MAX_CONSTANTS else None
    return Allowed(frozenset(map(type_of, listed)), constants)


def key_of(value: Any) -> Any:
    """Return a key that is equal for equal values: in JSON True and 1 differ, 1 and 1.0 are equal."""
    kind = type_of(value)
    return (kind, json.dumps(value, sort_keys=True) if kind in ("array", "object") else value)
