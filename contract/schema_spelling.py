"""Rewrites a schema in supported keywords: generators express the same constraints in several ways."""

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from contract.schema_values import Schema, properties_of, values_of

_MOST = ("maxItems", "maxLength", "maxProperties")
_NO_ANSWER_HAS = 2**31
"""A count that no answer reaches: as a maximum it forbids nothing."""
_SPEAKS_OF_ITEMS = frozenset(("allOf", "anyOf", "oneOf", "$ref", "if", "contains", "dependentSchemas"))
_OF_NAMES = frozenset(("pattern", "minLength", "maxLength"))
_BINDS_NAMES = _OF_NAMES | {"enum", "const", "type", "format", "not", "allOf", "anyOf", "oneOf", "$ref", "if"}
_IN_REFERENCES = "!#$%&'()*+,/:;=?@~"


def normalized(schema: Schema) -> Schema | bool:
    """Return an equal schema without keywords that are null, and with False for ``not: {}``.

    References become URIs; a maximum that no answer reaches is removed; ``unevaluatedItems`` becomes ``items``.
    """
    if "not" in schema and (schema["not"] is True or schema["not"] == {}):
        return False
    out = {key: value for key, value in schema.items() if value is not None or key in ("const", "type")}
    for key in _MOST:
        value = out.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= _NO_ANSWER_HAS:
            del out[key]
    if isinstance(out.get("$ref"), str):
        out["$ref"] = quote(re.sub("%(?![0-9A-Fa-f]{2})", "%25", out["$ref"]), safe=_IN_REFERENCES)
    if out.get("unevaluatedItems") is False and not _SPEAKS_OF_ITEMS & out.keys():
        del out["unevaluatedItems"]
        key = "additionalItems" if isinstance(out.get("items"), list) else "items"
        out.setdefault(key, False)
    return out


def well_formed(schema: Schema) -> Schema:
    """Return the schema without keywords whose values have a wrong type, such as ``"properties": []``."""
    out = {key: value for key, value in schema.items() if _FORMS.get(key, _is_anything)(value)}
    for key in _MAPS & out.keys():
        out[key] = {name: one for name, one in out[key].items() if _is_schema(one)}
    return out


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_one_or_several(value: Any) -> bool:
    return _is_schema(value) or _are_schemas(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_bound(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and (isinstance(value, int) or value.is_integer())


def _is_anything(_: Any) -> bool:
    return True


_MAPS = frozenset(("properties", "patternProperties"))
_FORMS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_MAPS, _is_map),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _are_schemas),
    **dict.fromkeys(("additionalProperties", "additionalItems", "propertyNames"), _is_schema),
    **dict.fromkeys(("pattern", "format", "$ref"), _is_text),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), _is_number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _is_bound),
    **dict.fromkeys(("minItems", "minLength", "minProperties", *_MOST), _is_count),
    "items": _is_one_or_several,
    "enum": _is_list,
    "required": _are_texts,
}
"""The valid values of each keyword: draft 4 allows booleans as exclusive bounds, and lists as ``items``."""


def closed_names(schema: Schema, names: Any) -> Schema | None:
    """Return an equal schema without ``propertyNames`` (``names``); None if no other keywords can express them."""
    out = {key: value for key, value in schema.items() if key != "propertyNames"}
    if not isinstance(names, dict):
        return out if names is True else None
    binding = _BINDS_NAMES & {key for key, value in names.items() if value is not None}
    types = names.get("type", "string")
    if types != "string" and not (isinstance(types, list) and "string" in types):
        return None
    binding -= {"type"}
    if not binding:
        return out
    rest = out.get("additionalProperties", True)
    listed = values_of(names)
    if listed is not None and len(binding) == 1 and not out.get("patternProperties"):
        own = properties_of(out)
        allowed = {name: own.get(name, rest) for name in listed if isinstance(name, str)}
        return {**out, "properties": allowed, "additionalProperties": False}
    pattern = _pattern_of(names) if binding <= _OF_NAMES else None
    if pattern is None or properties_of(out) or out.get("patternProperties"):
        return None
    return {**out, "patternProperties": {pattern: rest}, "additionalProperties": False}


def _pattern_of(names: Schema) -> str | None:
    """Return one pattern for ``pattern`` or for the bounds of a length; None for both together."""
    fewest = names.get("minLength", 0)
    most = names.get("maxLength", "")
    if "pattern" in names:
        is_alone = fewest == 0 and most == ""
        return names["pattern"] if is_alone and isinstance(names["pattern"], str) else None
    is_count = isinstance(fewest, int) and (most == "" or isinstance(most, int))
    return f"^[\\s\\S]{{{fewest},{most}}}$" if is_count else None
