"""Reduces JSON schemas to their constraints, in a form that the grammar library supports.

Annotations, unknown keywords, unknown formats and constraints that forbid nothing are removed. A bound that the library
does not support becomes the next tighter one that it does; any other unsupported constraint is refused by its path. Every
value that matches the result matches the schema.

"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from contract.schema_constraints import COUNTS, LOWER, UPPER, Constraints, Pointer, wrong_schema
from contract.schema_divisors import MAX_DIVISORS, num_remainders
from contract.schema_references import References
from contract.schema_spelling import closed_names, normalized, well_formed
from contract.schema_unions import Unions
from contract.schema_values import Schema

MAX_NAME_PATTERNS = 64
"""Limit of name patterns in one document: the library compares each with all others, and took minutes for 600."""

_ONE_SCHEMA = ("additionalProperties", "items", "additionalItems")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_DEFINITIONS = ("$defs", "definitions")
_KEPT = frozenset(
    (
        *("$ref", "$id", "id", "$schema", "$anchor", "const", "enum", "type"),
        *("required", "pattern", "format", "multipleOf"),
        *(*_ONE_SCHEMA, *_LISTS, *_MAPS, *UPPER, *LOWER, *COUNTS),
    )
)


def plain_schema(text: str, *, is_lenient: bool = False) -> str:
    """Return the schema's constraints as compact JSON.

    is_lenient: unsupported constraints are removed instead of refused. Raises InvalidRequestError about ``grammar`` for an
    invalid schema and for unsupported constraints.
    """
    return plain_schemas([text], is_lenient=is_lenient)[0]


def plain_schemas(texts: Sequence[str], *, is_lenient: bool = False) -> list[str]:
    """Return the constraints of several schemas; the cost limits apply to all of them together."""
    try:
        documents: list[Any] = []
        schemas: list[Schema] = []
        for text in texts:
            root = json.loads(text, parse_constant=_no_number)
            if isinstance(root, dict):
                reducer = _Reducer(root, is_lenient=is_lenient)
                root = reducer.reduced(root, ())
                schemas += reducer.schemas
            documents.append(root)
        _settle_divisors(schemas, is_lenient=is_lenient)
        _settle_name_patterns(schemas, is_lenient=is_lenient)
        written = [json.dumps(one, ensure_ascii=False, separators=(",", ":")) for one in documents]
        "".join(written).encode()
        return written
    except (ValueError, RecursionError) as error:
        raise wrong_schema(
            f"the json_schema is not valid JSON, or nested too deeply: {error}"[:300]
        ) from error


class _Reducer:
    """Reduces the schemas of one document. Keeps the targets of its references.

    schemas: the reduced schemas, each once.
    """

    def __init__(self, root: Schema, *, is_lenient: bool) -> None:
        self.schemas: list[Schema] = []
        self._is_lenient = is_lenient
        self._references = References(root)
        unions = Unions(self._references.resolved)
        for schema in schemas_within(root):
            unions.require_discriminator(schema)
        self._constraints = Constraints(self._references, unions, is_lenient=is_lenient)

    def reduced(self, schema: Any, at: Pointer) -> Any:
        """Return the constraints of ``schema``, which is at the pointer ``at``."""
        if not isinstance(schema, dict):
            return schema
        own = id(schema)
        spelled_out = normalized(schema)
        if isinstance(spelled_out, bool):
            return spelled_out
        if self._is_lenient:
            spelled_out = well_formed(spelled_out)
        if "propertyNames" in spelled_out:
            names = self._references.resolved(spelled_out["propertyNames"])
            spelled_out = closed_names(spelled_out, names) or spelled_out
        out: Schema = {}
        for key, value in spelled_out.items():
            place = (*at, key)
            is_path = self._references.leads_to_target(own, key)
            if key in _DEFINITIONS and self._references.are_all_pointers:
                out |= {key: self._reduced_path(own, key, value, place)} if is_path else {}
            elif key in _KEPT:
                out[key] = self._kept(key, value, place)
            elif is_path:
                out[key] = self._reduced_path(own, key, value, place)
        self._constraints.settle(spelled_out, out, at)
        self.schemas.append(out)
        return out

    def _kept(self, key: str, value: Any, place: Pointer) -> Any:
        if key in _LISTS and isinstance(value, list):
            return [self.reduced(one, (*place, str(i))) for i, one in enumerate(value)]
        if key in _MAPS and isinstance(value, dict):
            return {name: self.reduced(one, (*place, name)) for name, one in value.items()}
        return self.reduced(value, place) if key in _ONE_SCHEMA else value

    def _reduced_path(self, parent: int, key: str, value: Any, at: Pointer) -> Any:
        """Reduce a part of the document that is not a keyword but leads to the target of a reference."""
        if self._references.is_target(parent, key) or not isinstance(value, dict):
            return self.reduced(value, at)
        return {
            name: self._reduced_path(id(value), name, inner, (*at, name))
            for name, inner in value.items()
            if self._references.leads_to_target(id(value), name)
        }


def schemas_within(root: Any) -> Iterator[Schema]:
    """Yield the schema and every schema in it."""
    for _, schema in places_within(root):
        yield schema


def places_within(root: Any) -> Iterator[tuple[Pointer, Schema]]:
    """Yield the schema and every schema in it, each with its place."""
    waiting: list[tuple[Pointer, Any]] = [((), root)]
    while waiting:
        at, schema = waiting.pop()
        if isinstance(schema, dict):
            yield at, schema
            waiting += [((*at, *place), part) for place, part in parts_of(schema)]
            waiting += [
                ((*at, key), one) for key, one in schema.items() if key not in _KEPT
            ]  # targets of references


def parts_of(schema: Schema) -> Iterator[tuple[Pointer, Any]]:
    """Yield the schemas that a schema consists of, each with its place in it."""
    for key in _ONE_SCHEMA:
        if key in schema:
            yield (key,), schema[key]
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from (((key, str(i)), one) for i, one in enumerate(schema[key]))
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            yield from (((key, name), one) for name, one in schema[key].items())


def _settle_divisors(schemas: Sequence[Schema], *, is_lenient: bool) -> None:
    num_states = num_remainders(schemas)
    if num_states > MAX_DIVISORS and is_lenient:
        for schema in schemas:
            schema.pop("multipleOf", None)
    elif num_states > MAX_DIVISORS:
        raise wrong_schema(
            f"multipleOf: the divisors of this schema have {min(num_states, 10**15)} remainders; "
            f"the limit is {MAX_DIVISORS}"
        )


def _settle_name_patterns(schemas: Sequence[Schema], *, is_lenient: bool) -> None:
    patterned = [one for one in schemas if isinstance(one.get("patternProperties"), dict)]
    number = sum(len(one["patternProperties"]) for one in patterned)
    if number <= MAX_NAME_PATTERNS:
        return
    if not is_lenient:
        raise wrong_schema(
            f"patternProperties: this schema has {number} patterns of names; the limit is {MAX_NAME_PATTERNS}"
        )
    for one in patterned:
        del one["patternProperties"]
        one.pop("additionalProperties", None)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")
