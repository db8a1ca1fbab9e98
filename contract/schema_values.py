"""Reads from a JSON schema the types, constants and required properties of matching values."""

import json
import re
from typing import Any

Schema = dict[str, Any]

TYPES = frozenset(("null", "boolean", "number", "integer", "string", "array", "object"))
_SPELLINGS = {
    "string": r"str|text|(var)?char(\(\d+\))?|enum",
    "array": r"[^\[\]]*\[\]|(list|array|arr|tuple|set|sequence|vector)\b.*",
    "integer": r"u?int\d*|(un)?signed( int| long)?|long( long| int)?|short|(big|small|tiny)int",
    "number": r"num(eric)?|float\d*|double|decimal|real",
    "boolean": r"bool",
    "object": r"(dict|dictionary|map|object|record|struct|hash)\b.*",
    "null": r"none|nil|void",
}
"""Type names of other languages, which are used though JSON Schema does not define them."""


def spelled(name: str) -> str:
    """Return JSON Schema's name of a type, if it is one."""
    name = name.lower()
    found = (one for one, others in _SPELLINGS.items() if re.fullmatch(others, name, re.DOTALL))
    return name if name in TYPES else next(found, name)


def types_of(schema: Schema) -> set[str]:
    """Return the possible JSON types of a value, with integers as numbers."""
    constants = values_of(schema)
    if constants is not None:
        return {type_of(value) for value in constants}
    given = schema.get("type")
    named = given if isinstance(given, list) else [given]
    texts = {one for one in named if isinstance(one, str)}
    if not texts or len(texts) < len(named):
        return {"null", "boolean", "number", "string", "array", "object"}
    return {"number" if one == "integer" else one for one in texts}


def type_of(value: Any) -> str:
    """Return the type of a JSON value, with integers as numbers."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"


def values_of(schema: Schema) -> list[Any] | None:
    """Return the listed values; None if the schema lists none."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def canonical(value: Any) -> str:
    """Return the same text for equal values: 1 and 1.0 are equal."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def required_of(schema: Schema) -> set[str]:
    """Return the names of the properties that a value must have."""
    required = schema.get("required")
    return {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()


def properties_of(schema: Schema) -> Schema:
    """Return the schemas of the named properties."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}
