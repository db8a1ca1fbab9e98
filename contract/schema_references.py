"""What the references of one JSON schema point to, within the document."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from contract.schema_values import Schema

MAX_REFERENCES = 1_000
"""What one reference may lead to by way of others."""


class References:
    """Looks up references, and knows which parts of the document lead to their targets.

    A place is a dictionary of the document, by its id, and a key of it.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._targets: set[tuple[int, str]] = set()
        self._ways: set[tuple[int, str]] = set()
        self._found: dict[str, Any] = {}
        self._names: set[str] = set()
        self.are_all_pointers = True
        """None is by an anchor or an id, so that what no pointer leads to is not needed."""
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

    def is_way(self, parent: int, key: str) -> bool:
        """Whether a target stands there or further within."""
        return (parent, key) in self._ways

    def is_target(self, parent: int, key: str) -> bool:
        """Whether a target stands there."""
        return (parent, key) in self._targets

    def resolved(self, schema: Any) -> Any:
        """Follow references within the document, as far as they lead."""
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
        """Whether a reference leads to a schema of this document."""
        if _is_pointer(reference):
            return isinstance(self._find(reference), dict | bool)
        return unquote(reference.removeprefix("#")) in self._names or "$id" in self._root

    def _find(self, reference: str) -> Any:
        """Return what a pointer points to, None where nothing stands there, and note the way."""
        node: Any = self._root
        place: tuple[int, str] | None = None
        for part in unquote(reference.removeprefix("#")).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict):
                place = (id(node), part)
                self._ways.add(place)
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
