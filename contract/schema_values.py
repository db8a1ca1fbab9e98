"""What a JSON schema shows of the values that match it: their types, constants and required properties."""

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
"""Names of types that are no JSON Schema, and are written all the same: those of other languages."""


def spelled(name: str) -> str:
    """Return the name of a type as JSON Schema writes it, where it is one."""
    name = name.lower()
    found = (one for one, others in _SPELLINGS.items() if re.fullmatch(others, name, re.DOTALL))
    return name if name in TYPES else next(found, name)


def types_of(schema: Schema) -> set[str]:
    """Return the types of JSON that a value may have, integers as numbers."""
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
    """Return the type of a JSON value, integers as numbers."""
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
    """Return the values that are listed; None where none are."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def canonical(value: Any) -> str:
    """Return one text for all spellings of a value: 1 and 1.0 are equal."""
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
