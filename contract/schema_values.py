"""What a JSON schema shows of the values that match it: their types, constants and required properties."""

import json
from typing import Any

Schema = dict[str, Any]


def are_disjoint(a: Any, b: Any) -> bool:
    """Whether no value matches both, as far as their types, constants and required properties show."""
    if a is False or b is False:
        return True
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False
    if not types_of(a) & types_of(b):
        return True
    first, second = _constants(a), _constants(b)
    if first is not None and second is not None and not first & second:
        return True
    if types_of(a) & types_of(b) != {"object"}:
        return False
    shared = required_of(a) & required_of(b) & properties_of(a).keys() & properties_of(b).keys()
    return any(are_disjoint(properties_of(a)[name], properties_of(b)[name]) for name in shared)


def types_of(schema: Schema) -> set[str]:
    """Return the types of JSON that a value may have, integers as numbers."""
    constants = _values(schema)
    if constants is not None:
        return {_type_of(value) for value in constants}
    given = schema.get("type")
    named = given if isinstance(given, list) else [given]
    texts = {one for one in named if isinstance(one, str)}
    if len(texts) < len(named):
        return {"null", "boolean", "number", "string", "array", "object"}
    return {"number" if one == "integer" else one for one in texts}


def _type_of(value: Any) -> str:
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


def _values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _constants(schema: Schema) -> set[str] | None:
    values = _values(schema)
    return None if values is None else {_canonical(value) for value in values}


def _canonical(value: Any) -> str:
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
