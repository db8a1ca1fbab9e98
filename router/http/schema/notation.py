"""The building blocks of field descriptions."""

from typing import Any

from router.http.bodies.body import UNSERVED, Json

INT31 = 2**31 - 1
INT64 = 2**63


def field(kind: str, meaning: str, **more: Any) -> Json:
    """Describe a field that may be missing or null, both of which mean the default."""
    return {"type": [kind, "null"], "description": meaning, **more}


def numbers(low: float, high: float) -> Json:
    """Return the bounds of a number, both included."""
    return {"minimum": low, "maximum": high}


def described(required: list[str], properties: dict[str, Json]) -> Json:
    """Return the schema of an object with these fields."""
    return {"type": "object", "required": required, "properties": properties}


def refused_fields(neutral: dict[str, tuple[Any, ...]]) -> dict[str, Json]:
    """Return the schemas of fields that are rejected without a neutral value. neutral: field → its neutral values."""
    return {
        name: {"anyOf": [{"type": "null"}, *({"const": idle} for idle in values)], UNSERVED: True}
        for name, values in neutral.items()
    }


MODEL = field("string", "Name of the served model. Default: the one that is served.")
TOKEN_ID: Json = {"type": "integer", **numbers(0, INT31)}
