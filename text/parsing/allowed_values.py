"""Sets of JSON values as schemas describe them, and the JSON text of a bare text that stands for one of those."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from text.parsing.json_text import decoded

ANY = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
"""All types; a number may also be an integer."""
_SPELLED = {"True": "true", "False": "false", "None": "null"}


MAX_CONSTANTS = 256
"""Values that are kept of a list. Of a longer one only the types are known, so that sets of many schemas cost little."""


@dataclass(frozen=True)
class Allowed:
    """The values of some types; only ``constants`` of them, by their keys, where a schema lists those."""

    types: frozenset[str] = ANY
    constants: Mapping[Any, Any] | None = None

    @property
    def is_text(self) -> bool:
        """Every one of them is a string."""
        return self.types == {"string"}

    def both(self, other: "Allowed") -> "Allowed":
        """What is in this set and in the other one."""
        types = self.types & other.types
        known = [one for one in (self.constants, other.constants) if one is not None]
        if not known:
            return Allowed(types)
        constants = {key: known[0][key] for key in known[0] if all(key in one for one in known)}
        return one_of(value for value in constants.values() if type_of(value) in types)

    def either(self, other: "Allowed") -> "Allowed":
        """What is in this set or in the other one."""
        types = self.types | other.types
        if self.constants is None or other.constants is None:
            return Allowed(types)
        constants = {**self.constants, **other.constants}
        return Allowed(types, constants if len(constants) <= MAX_CONSTANTS else None)

    def written(self, text: str) -> str:
        """The JSON text of the value that ``text`` stands for.

        Where several types are possible, it is a string; where every type is, objects and lists are no strings.
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
    """The name of a value's type; a number without a fraction is an integer."""
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
    """The JSON text of a string."""
    return json.dumps(text, ensure_ascii=False)


def one_of(values: Iterable[Any]) -> Allowed:
    """The values that are listed."""
    listed = list(values)
    constants = {key_of(value): value for value in listed} if len(listed) <= MAX_CONSTANTS else None
    return Allowed(frozenset(map(type_of, listed)), constants)


def key_of(value: Any) -> Any:
    """A key by which equal values are found: True and 1 are two values in JSON, 1 and 1.0 are one."""
    kind = type_of(value)
    return (kind, json.dumps(value, sort_keys=True) if kind in ("array", "object") else value)
