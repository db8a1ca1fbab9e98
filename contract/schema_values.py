"""What a JSON schema shows of the values that match it: their types, constants and required properties."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

Schema = dict[str, Any]


class _TooMuchWorkError(Exception):
    """The budget is used up."""


@dataclass(frozen=True)
class _Facts:
    """What one schema shows. certain: the properties that every value has, and that have a schema."""

    schema: Schema
    types: frozenset[str]
    constants: frozenset[str] | None
    certain: frozenset[str]


class Disjointness:
    """Decides whether a value can match two schemas of a list, as far as types, constants and required properties show.

    max_work: what all questions may cost together, in values that are looked at; beyond it nothing is known to be disjoint.
    Clients write the schemas, and comparing each with each takes time that grows with the square of their number.
    """

    def __init__(self, max_work: int = 2**18) -> None:
        self._work_left = max_work
        self._known: dict[int, _Facts] = {}

    def are_disjoint(self, schemas: Sequence[Any]) -> bool:
        """Whether no value is known to match two of them."""
        try:
            return self._are_disjoint(schemas)
        except _TooMuchWorkError:
            return False

    def _are_disjoint(self, schemas: Sequence[Any]) -> bool:
        """Look at all at once, by their types, and at pairs only where that tells nothing."""
        self._spend(len(schemas))
        matching = [schema for schema in schemas if schema is not False]
        if len(matching) < 2:
            return True
        if not all(isinstance(schema, dict) for schema in matching):
            return False
        by_types: dict[frozenset[str], list[_Facts]] = {}
        for schema in matching:
            facts = self._facts(schema)
            by_types.setdefault(facts.types, []).append(facts)
        if sum(map(len, by_types)) == len(frozenset().union(*by_types)):
            return all(self._differ(alike) for alike in by_types.values())
        return self._differ_in_pairs([facts for alike in by_types.values() for facts in alike])

    def _differ(self, alike: list[_Facts]) -> bool:
        """Whether schemas of the same types are disjoint."""
        constants = [facts.constants for facts in alike if facts.constants is not None]
        if len(constants) == len(alike):
            self._spend(sum(map(len, constants)))
            return sum(map(len, constants)) == len(frozenset().union(*constants))
        if alike[0].types == {"object"} and self._differ_in_a_property(alike):
            return True
        return self._differ_in_pairs(alike)

    def _differ_in_a_property(self, alike: Sequence[_Facts]) -> bool:
        """Whether one property, that every value has, is disjoint in all of them."""
        self._spend(sum(len(facts.certain) for facts in alike))
        shared = frozenset.intersection(*(facts.certain for facts in alike))
        return any(
            self._are_disjoint([facts.schema["properties"][name] for facts in alike]) for name in shared
        )

    def _differ_in_pairs(self, alike: list[_Facts]) -> bool:
        return all(self._is_disjoint_pair(first, second) for first, second in combinations(alike, 2))

    def _is_disjoint_pair(self, first: _Facts, second: _Facts) -> bool:
        self._spend(4)
        types = first.types & second.types
        if not types:
            return True
        if first.constants is not None and second.constants is not None:
            self._spend(min(len(first.constants), len(second.constants)))
            if first.constants.isdisjoint(second.constants):
                return True
        return types == {"object"} and self._differ_in_a_property((first, second))

    def _facts(self, schema: Schema) -> _Facts:
        known = self._known.get(id(schema))
        if known is None:
            constants = _constants(schema)
            certain = required_of(schema) & properties_of(schema).keys()
            types = frozenset(types_of(schema))
            known = _Facts(
                schema, types, None if constants is None else frozenset(constants), frozenset(certain)
            )
            self._known[id(schema)] = known  # and keeps the schema, so that no other one gets its id
        return known

    def _spend(self, work: int) -> None:
        self._work_left -= work
        if self._work_left < 0:
            raise _TooMuchWorkError


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
