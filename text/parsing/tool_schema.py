"""Finds the allowed values of a tool's parameter in its JSON schema, and converts bare text to one of these values.

References within the schema (by pointer, ``$anchor`` and ``$id``), ``allOf``, ``anyOf``, ``oneOf``, ``then`` and ``else``
are followed. An unknown keyword, or one of a wrong type, restricts nothing.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any
from urllib.parse import unquote, urljoin

from contract.schema_values import spelled
from text.parsing.reader import decoded

ANY = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
"""All types; "number" excludes integers."""
_SPELLED = {"True": "true", "False": "false", "None": "null"}
# Of a longer list only the types are kept, so that sets of many schemas cost little.
MAX_CONSTANTS = 256
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_MAX_DEPTH = 64
"""Depth to which references and nested schemas are followed; deeper ones restrict nothing."""
_IMPLIED = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "object": ("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
}
"""Keywords that imply a type if the schema names none."""
_Reader = Callable[[Any, int], "Allowed | None"]


@dataclass(frozen=True)
class Allowed:
    """All values of some types, or only ``constants`` of them (by key) if a schema lists these."""

    types: frozenset[str] = ANY
    constants: Mapping[Any, Any] | None = None

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


class ToolSchema:
    """The schema of one tool's parameters. Each schema in it is read once, even if it is referred to several times."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._values: dict[int, Allowed | None] = {}
        self._parameters: dict[str, Allowed] = {}
        self._places: dict[str, Any] | None = None

    def parameter(self, name: str) -> Allowed:
        """Return the allowed values of a parameter; all values if the schema does not restrict it."""
        if name not in self._parameters:
            seen: set[int] = set()
            self._parameters[name] = self._property(name, seen, self._root, 0) or Allowed()
        return self._parameters[name]

    def _property(self, name: str, seen: set[int], schema: Any, depth: int) -> Allowed | None:
        """Return an object schema's restriction of one of its properties; None if there is none."""
        if not isinstance(schema, dict) or id(schema) in seen or depth > _MAX_DEPTH:
            return None
        seen.add(id(schema))
        own = _either(self._value(one, depth + 1) for one in _schemas_of_property(schema, name))
        return _both([own, *self._composed(schema, partial(self._property, name, seen), depth)])

    def _value(self, schema: Any, depth: int) -> Allowed | None:
        """Return the values that a schema allows; None if it only refers to itself."""
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return Allowed()
        if id(schema) not in self._values:
            # A schema that refers to itself finds this entry, and so restricts nothing by that reference.
            self._values[id(schema)] = None
            composed = self._composed(schema, self._value, depth)
            found = _both([_own(schema), *composed])
            if found == Allowed() or (found is None and not composed):
                # Without a type, the keywords that are about one type show which types are meant.
                names = [name for name, words in _IMPLIED.items() if any(word in schema for word in words)]
                found = Allowed(frozenset[str]().union(*map(_named_type, names)) or ANY)
            self._values[id(schema)] = found
        return self._values[id(schema)]

    def _composed(self, schema: dict[str, Any], read: _Reader, depth: int) -> list[Allowed | None]:
        """Return the restrictions of the schemas that a schema refers to and is composed of, all of which apply."""
        targets = [self._target(schema[name]) for name in _REFERENCES if isinstance(schema.get(name), str)]
        parts = [read(one, depth + 1) for one in (*targets, *_listed(schema, "allOf"))]
        branches = [_listed(schema, name) for name in ("anyOf", "oneOf")]
        branches.append([schema[name] for name in ("then", "else") if name in schema])
        return parts + [_either(read(one, depth + 1) for one in those) for those in branches if those]

    def _target(self, reference: str) -> Any:
        """Return the target of a reference; None if it is not in this document."""
        base, _, fragment = reference.partition("#")
        document = self._root if not base else self._named().get(self._absolute(base))
        if fragment and not fragment.startswith("/"):
            return self._named().get(f"#{fragment}")
        for step in unquote(fragment).split("/")[1:]:
            document = _within(document, step.replace("~1", "/").replace("~0", "~"))
        return document

    def _absolute(self, uri: str) -> str:
        """Resolve a URI relative to the root's own id."""
        if uri.startswith("#") or not isinstance(self._root, dict):
            return uri
        own = next((self._root[key] for key in ("$id", "id") if isinstance(self._root.get(key), str)), "")
        try:
            return urljoin(own, uri)
        except ValueError:
            return uri

    def _named(self) -> dict[str, Any]:
        """Return the named schemas: by resolved ``$id``, and by anchor after a ``#``."""
        if self._places is None:
            self._places = {}
            waiting = [self._root]
            while waiting:
                node = waiting.pop()
                waiting += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
                if isinstance(node, dict):
                    self._places |= {
                        self._absolute(f"{sign}{node[name]}".removesuffix("#")): node
                        for name, sign in (("$id", ""), ("id", ""), ("$anchor", "#"), ("$dynamicAnchor", "#"))
                        if isinstance(node.get(name), str)
                    }
        return self._places


def _within(document: Any, step: str) -> Any:
    if isinstance(document, dict):
        return document.get(step)
    is_index = isinstance(document, list) and step.isdecimal() and len(step) < 10
    return document[int(step)] if is_index and int(step) < len(document) else None


def _schemas_of_property(schema: dict[str, Any], name: str) -> list[Any]:
    """Return the schema of the named property, else those of all patterns: a client's patterns are never executed."""
    named = schema.get("properties")
    if isinstance(named, dict) and name in named:
        return [named[name]]
    patterns = schema.get("patternProperties")
    others = list(patterns.values()) if isinstance(patterns, dict) else []
    rest = schema.get("additionalProperties")
    return [*others, rest] if isinstance(rest, dict) else others


def _listed(schema: dict[str, Any], name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []


def _own(schema: dict[str, Any]) -> Allowed | None:
    """Return the restriction by ``type``, ``enum``, ``const`` and OpenAPI's ``nullable``; None if there is none."""
    found = schema.get("type")
    names = [one for one in (found if isinstance(found, list) else [found]) if isinstance(one, str)]
    types = frozenset[str]().union(*(_named_type(name) for name in names))
    allowed = Allowed(types or ANY)
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        allowed = allowed.both(one_of(schema["enum"]))
    if "const" in schema:
        allowed = allowed.both(one_of([schema["const"]]))
    if schema.get("nullable") is True:
        allowed = allowed.either(one_of([None]))
    return None if allowed == Allowed() else allowed


def _named_type(name: str) -> frozenset[str]:
    name = spelled(name)
    return frozenset({"number", "integer"}) if name == "number" else ANY & {name}


def _both(parts: Iterable[Allowed | None]) -> Allowed | None:
    """Return the intersection of the restrictions that are not None; None if all are."""
    known = [part for part in parts if part is not None]
    return reduce(Allowed.both, known) if known else None


def _either(parts: Iterable[Allowed | None]) -> Allowed | None:
    """Return the union of the restrictions that are not None; None if all are."""
    known = [part for part in parts if part is not None]
    return reduce(Allowed.either, known) if known else None
