"""Resolves the references of one JSON schema within its document."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from contract.schema_values import Schema

MAX_REFERENCES = 1_000
"""Limit of a chain of references."""


class References:
    """Resolves references, and records which parts of the document lead to their targets.

    A location is a dictionary of the document, by its id, and one of its keys.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._targets: set[tuple[int, str]] = set()
        self._paths: set[tuple[int, str]] = set()
        self._found: dict[str, Any] = {}
        self._names: set[str] = set()
        self.are_all_pointers = True
        """True if no reference uses an anchor or an id; then parts to which no pointer leads are not needed."""
        for node in _dictionaries(root):
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

    def is_target(self, parent: int, key: str) -> bool:
        """Return True if a target is at this location."""
        return (parent, key) in self._targets

    def resolved(self, schema: Any) -> Any:
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
            self._targets.add(place)
        return node


def _is_pointer(reference: str) -> bool:
    return reference == "#" or reference.startswith("#/")


def _dictionaries(root: Any) -> Iterator[Schema]:
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
            yield value
