"""Reads from a JSON schema the types, constants and required properties of matching values, and resolves its references."""

import json
import re
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

TYPES = frozenset(("null", "boolean", "number", "integer", "string", "array", "object"))
# Type names of other languages, which are used though JSON Schema does not define them.
_SPELLINGS = {
    "string": r"str|text|(var)?char(\(\d+\))?|enum",
    "array": r"[^\[\]]*\[\]|(list|array|arr|tuple|set|sequence|vector)\b.*",
    "integer": r"u?int\d*|(un)?signed( int| long)?|long( long| int)?|short|(big|small|tiny)int",
    "number": r"num(eric)?|float\d*|double|decimal|real",
    "boolean": r"bool",
    "object": r"(dict|dictionary|map|object|record|struct|hash)\b.*",
    "null": r"none|nil|void",
}
# Of one chain, which may be a circle.
MAX_REFERENCES = 1_000


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


class References:
    """Resolves references, and records which parts of the document lead to their targets.

    A location is a dictionary of the document, by its id, and one of its keys.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self.targets: set[tuple[int, str]] = set()
        """The locations of the targets."""
        self._paths: set[tuple[int, str]] = set()
        self._found: dict[str, Any] = {}
        self._names: set[str] = set()
        self.are_all_pointers = True
        """True if no reference uses an anchor or an id; then parts to which no pointer leads are not needed."""
        waiting: list[Any] = [root]
        while waiting:
            node = waiting.pop()
            if isinstance(node, list):
                waiting += node
            if not isinstance(node, dict):
                continue
            waiting += node.values()
            self._names |= {
                node[key]
                for key in ("$anchor", "$id", "id", "$dynamicAnchor")
                if isinstance(node.get(key), str)
            }
            if isinstance(reference := node.get("$ref"), str):
                self.are_all_pointers &= _is_pointer(reference)
                self._found.setdefault(reference, None)
        for reference in self._found:
            self._find(reference)
        self._found.clear()

    def leads_to_target(self, parent: int, key: str) -> bool:
        """Return True if a target is at this location or inside it."""
        return (parent, key) in self._paths

    def resolve(self, schema: Any) -> Any:
        """Follow references within the document as far as possible."""
        seen: list[str] = []
        while isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
            if reference in self._found:
                schema = self._found[reference]
                break
            if len(seen) > MAX_REFERENCES or not _is_pointer(reference):
                break
            seen.append(reference)
            schema = self._find(reference)
        # Every reference of the chain leads to the same schema: long chains are followed once.
        self._found |= dict.fromkeys(seen, schema)
        return schema

    def lead_within(self, reference: str) -> bool:
        """Return True if a reference leads to a schema of this document."""
        if _is_pointer(reference):
            return isinstance(self._find(reference), dict | bool)
        return unquote(reference.removeprefix("#")) in self._names or "$id" in self._root

    def _find(self, reference: str) -> Any:
        """Return the target of a pointer, None if there is none, and record the path to it."""
        node: Any = self._root
        place: tuple[int, str] | None = None
        for part in unquote(reference.removeprefix("#")).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict):
                place = (id(node), part)
                self._paths.add(place)
                node = node.get(part)
            elif isinstance(node, list) and part.isdecimal() and len(part) < 10 and int(part) < len(node):
                node = node[int(part)]
            else:
                return None
        if place:
            self.targets.add(place)
        return node


def _is_pointer(reference: str) -> bool:
    return reference == "#" or reference.startswith("#/")
