"""Sets of JSON values as schemas describe them, and the JSON text of a bare text that stands for one of those."""

import json
from dataclasses import dataclass
from typing import Any

from text.parsing.json_text import decoded

ANY = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
"""All types; a number may also be an integer."""
_SPELLED = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class Allowed:
    """The values of some types; only ``constants`` of them where a schema lists those."""

    types: frozenset[str] = ANY
    constants: tuple[Any, ...] | None = None

    @property
    def is_text(self) -> bool:
        """Every one of them is a string."""
        return self.types == {"string"}

    def both(self, other: "Allowed") -> "Allowed":
        """What is in this set and in the other one."""
        types = self.types & other.types
        constants = self.constants if other.constants is None else other.constants
        if constants is None:
            return Allowed(types)
        if self.constants is not None:
            constants = tuple(one for one in constants if _is_in(one, self.constants))
        constants = tuple(one for one in constants if type_of(one) in types)
        return Allowed(frozenset(map(type_of, constants)), constants)

    def either(self, other: "Allowed") -> "Allowed":
        """What is in this set or in the other one."""
        types = self.types | other.types
        if self.constants is None or other.constants is None:
            return Allowed(types)
        return Allowed(types, self.constants + other.constants)

    def written(self, text: str) -> str:
        """The JSON text of the value that ``text`` stands for.

        Where several types are possible, it is a string; where every type is, objects and lists are no strings.
        """
        bare = text.strip()
        bare = _SPELLED.get(bare, bare)
        value = decoded(bare)
        if value is None and bare != "null":
            return quoted(text)
        if self.constants and not _is_in(text, self.constants) and _is_in(value, self.constants):
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


def _is_in(value: Any, constants: tuple[Any, ...]) -> bool:
    """True and 1 are two values in JSON, 1 and 1.0 are one."""
    return any(type_of(value) == type_of(one) and value == one for one in constants)
