"""JSON schemas reduced to what constrains an answer, in a form that the grammar library takes.

Annotations, keywords that JSON Schema does not define, names of unknown formats and constraints that forbid nothing are
left out; a bound that the library cannot hold becomes the next tighter one that it can; a constraint that cannot be held
at all is refused by its path. What matches the result matches the schema.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from contract.errors import InvalidRequestError
from contract.schema_divisors import MAX_DIVISORS, num_remainders
from contract.schema_patterns import NotHeldError, respelled
from contract.schema_references import References
from contract.schema_spelling import closed_names, plainly_spelled, well_formed
from contract.schema_unions import Unions
from contract.schema_values import TYPES, properties_of, required_of, spelled, types_of

Pointer = tuple[str, ...]
Schema = dict[str, Any]

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""The formats that are enforced; others are annotations."""
MAX_BOUND = 2**63 - 1024
"""The largest number up to which the library holds bounds, and which a double holds exactly."""
MIN_BOUND = 1e-30
"""The smallest number above 0 by which the library bounds others."""
MAX_NAME_PATTERNS = 64
"""Patterns of names in one document: the library compares them with each other, 600 took it minutes."""

_ONE_SCHEMA = ("additionalProperties", "items", "additionalItems")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_DEFINITIONS = ("$defs", "definitions")
_UPPER = ("maximum", "exclusiveMaximum")
_LOWER = ("minimum", "exclusiveMinimum")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_KEPT = frozenset(
    (
        *("$ref", "$id", "id", "$schema", "$anchor", "const", "enum", "type"),
        *("required", "pattern", "format", "multipleOf"),
        *(*_ONE_SCHEMA, *_LISTS, *_MAPS, *_UPPER, *_LOWER, *_COUNTS),
    )
)
_CANNOT_HOLD = frozenset(
    "not if dependentRequired dependentSchemas dependencies uniqueItems contains propertyNames unevaluatedProperties "
    "unevaluatedItems $dynamicRef $recursiveRef disallow extends divisibleBy".split()
)
_IN_PLACE = frozenset(("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "patternProperties"))


def plain_schema(text: str, *, is_lenient: bool = False) -> str:
    """Return the schema's constraints as compact JSON.

    is_lenient: constraints that cannot be held are left out instead of refused. Raises InvalidRequestError about
    ``grammar`` for what is no schema, and for what cannot be held.
    """
    return plain_schemas([text], is_lenient=is_lenient)[0]


def plain_schemas(texts: Sequence[str], *, is_lenient: bool = False) -> list[str]:
    """Return the constraints of several schemas, which may cost together what one may."""
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
        raise _wrong(f"the json_schema is not valid JSON, or too deep: {error}"[:300]) from error


class _Reducer:
    """Reduces the schemas of one document. Keeps what its references point to, wherever that stands.

    schemas: what the schemas were reduced to, each once.
    """

    def __init__(self, root: Schema, *, is_lenient: bool) -> None:
        self.schemas: list[Schema] = []
        self._is_lenient = is_lenient
        self._references = References(root)
        self._unions = Unions(self._references.resolved)
        for schema in schemas_within(root):
            self._unions.tell_apart(schema)

    def reduced(self, schema: Any, at: Pointer) -> Any:
        """Return what ``schema``, which stands at ``at``, constrains."""
        if not isinstance(schema, dict):
            return schema
        own = id(schema)
        spelled_out = plainly_spelled(schema)
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
            is_way = self._references.is_way(own, key)
            if key in _DEFINITIONS and self._references.are_all_pointers:
                out |= {key: self._way(own, key, value, place)} if is_way else {}
            elif key in _KEPT:
                out[key] = self._kept(key, value, place)
            elif is_way:
                out[key] = self._way(own, key, value, place)
        self._settle(spelled_out, out, at)
        self.schemas.append(out)
        return out

    def _settle(self, schema: Schema, out: Schema, at: Pointer) -> None:
        """Hold, drop or refuse each constraint of ``out``, which ``schema`` was reduced to."""
        self._refuse(schema, out, at)
        self._settle_types(out, at)
        self._settle_bounds(out, at)
        _drop_what_forbids_nothing(out)
        self._settle_patterns(out, at)
        self._refuse_counts(out, at)
        self._settle_one_of(out)
        reference = out.get("$ref")
        if self._is_lenient and isinstance(reference, str) and not self._references.lead_within(reference):
            del out["$ref"]

    def _kept(self, key: str, value: Any, place: Pointer) -> Any:
        if key in _LISTS and isinstance(value, list):
            return [self.reduced(one, (*place, str(i))) for i, one in enumerate(value)]
        if key in _MAPS and isinstance(value, dict):
            return {name: self.reduced(one, (*place, name)) for name, one in value.items()}
        return self.reduced(value, place) if key in _ONE_SCHEMA else value

    def _way(self, parent: int, key: str, value: Any, at: Pointer) -> Any:
        """Reduce a part of the document that is no keyword but leads to the target of a reference."""
        if self._references.is_target(parent, key) or not isinstance(value, dict):
            return self.reduced(value, at)
        return {
            name: self._way(id(value), name, inner, (*at, name))
            for name, inner in value.items()
            if self._references.is_way(id(value), name)
        }

    def _refuse(self, schema: Schema, out: Schema, at: Pointer) -> None:
        """Raise InvalidRequestError for a constraint that is dropped, unless it forbids nothing or that is allowed."""
        if _closes_itself(schema):
            out["additionalProperties"] = False
            return
        for key in schema:
            if key in _CANNOT_HOLD and not self._forbids_nothing(key, schema) and not self._is_lenient:
                raise _wrong(
                    f"{shown((*at, key))}: the constraint {key} cannot be held while an answer is written; remove it"
                )

    def _forbids_nothing(self, key: str, schema: Schema) -> bool:
        if key != "not":
            return _forbids_nothing(key, schema)
        others = {name: value for name, value in schema.items() if name != "not"}
        return self._unions.are_apart([others, schema["not"]])

    def _settle_types(self, out: Schema, at: Pointer) -> None:
        if "type" not in out:
            return
        given = out["type"] if isinstance(out["type"], list) else [out["type"]]
        if all(isinstance(one, str) and one in TYPES for one in given):
            return
        if not self._is_lenient:
            raise _wrong(f"{shown((*at, 'type'))}: {str(out['type'])[:40]!r} is no type of JSON Schema")
        types = [spelled(one) if isinstance(one, str) else "" for one in given]
        del out["type"]
        if all(one in TYPES for one in types):
            out["type"] = types if len(types) > 1 else types[0]

    def _settle_bounds(self, out: Schema, at: Pointer) -> None:
        for key in _COUNTS:
            value = out.get(key)
            if isinstance(value, float) and value.is_integer():
                out[key] = int(value)
        for key in (*_UPPER, *_LOWER):
            value = out.get(key)
            if not isinstance(value, int | float) or isinstance(value, bool):
                continue
            bound = _held_bound(value, is_upper=key in _UPPER, is_integer=out.get("type") == "integer")
            if bound is not None:
                out[key] = bound
            elif self._is_lenient:
                del out[key]
            else:
                raise _wrong(f"{shown((*at, key))}: bounds are held between -{MAX_BOUND} and {MAX_BOUND}")

    def _settle_patterns(self, out: Schema, at: Pointer) -> None:
        """Write patterns as the library does."""
        key = "pattern"
        patterns = out.get("patternProperties")
        try:
            if isinstance(out.get(key), str):
                out[key] = respelled(out[key])
            key = "patternProperties"
            if isinstance(patterns, dict):
                out[key] = {respelled(pattern): one for pattern, one in patterns.items()}
        except NotHeldError as error:
            if not self._is_lenient:
                raise _wrong(
                    f"{shown((*at, key))}: {error} in a pattern cannot be held; write it without"
                ) from error
            del out[key]
            if key == "patternProperties":
                out.pop("additionalProperties", None)
            self._settle_patterns(out, at)

    def _refuse_counts(self, out: Schema, at: Pointer) -> None:
        """The library counts properties only where all named ones are required, or to tell none from some."""
        if properties_of(out).keys() <= required_of(out):
            return
        for key in ("minProperties", "maxProperties"):
            if key in out and self._is_lenient:
                del out[key]
            elif key in out:
                raise _wrong(
                    f"{shown((*at, key))}: {key} cannot be held beside properties that are not required; remove it"
                )

    def _settle_one_of(self, out: Schema) -> None:
        """Turn oneOf into anyOf where no value can match two of its branches."""
        branches = out.get("oneOf")
        if not isinstance(branches, list) or not (self._is_lenient or self._unions.are_apart(branches)):
            return
        del out["oneOf"]
        if "anyOf" not in out:
            out["anyOf"] = branches
        elif isinstance(out.get("allOf", []), list):
            out["allOf"] = [*out.get("allOf", []), {"anyOf": branches}]


def schemas_within(root: Any) -> Iterator[Schema]:
    """Yield every schema within, itself the first."""
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict):
            continue
        yield schema
        waiting += [schema[key] for key in _ONE_SCHEMA if key in schema]
        waiting += [one for key in _LISTS if isinstance(schema.get(key), list) for one in schema[key]]
        waiting += [one for key in _MAPS if isinstance(schema.get(key), dict) for one in schema[key].values()]
        waiting += [one for key, one in schema.items() if key not in _KEPT]  # what references point to


def shown(at: Pointer) -> str:
    """Return a pointer as it is shown to clients, cut in the middle where it is long."""
    text = "#" + "".join(f"/{part}" for part in at)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-90:]}"


def _closes_itself(schema: Schema) -> bool:
    """Whether unevaluatedProperties means the same as additionalProperties, and is the only one of both."""
    return (
        schema.get("unevaluatedProperties") is False
        and "additionalProperties" not in schema
        and not (_IN_PLACE & schema.keys())
        and not ((_CANNOT_HOLD - {"unevaluatedProperties"}) & schema.keys())
    )


def _forbids_nothing(key: str, schema: Schema) -> bool:
    value = schema[key]
    match key:
        case "uniqueItems":
            return value in (False, None) or schema.get("maxItems") in (0, 1)
        case "if":
            return all(schema.get(branch, True) in (True, {}) for branch in ("then", "else"))
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return value in ({}, None) or (
                isinstance(value, dict) and all(one in ([], {}, True) for one in value.values())
            )
        case "contains":
            return schema.get("minContains") == 0 and "maxContains" not in schema
        case "propertyNames" | "unevaluatedProperties" | "unevaluatedItems":
            return value is True or value == {}
    return False


def _drop_what_forbids_nothing(out: Schema) -> None:
    for key in ("minItems", "minLength", "minProperties"):
        if out.get(key) == 0:
            del out[key]
    if out.get("required") == []:
        del out["required"]
    if out.get("patternProperties") == {}:
        del out["patternProperties"]
    if "additionalItems" in out and not isinstance(out.get("items"), list):
        del out["additionalItems"]
    if "format" in out and (out["format"] not in FORMATS or "string" not in types_of(out)):
        del out["format"]
    _drop_counts_of_properties(out)


def _drop_counts_of_properties(out: Schema) -> None:
    """Drop minProperties that ``required`` implies, and maxProperties that the named properties imply."""
    fewest = out.get("minProperties")
    if isinstance(fewest, int) and fewest <= len(required_of(out)):
        del out["minProperties"]
    most = out.get("maxProperties")
    is_closed = out.get("additionalProperties") is False and "patternProperties" not in out
    if isinstance(most, int) and is_closed and most >= len(properties_of(out)):
        del out["maxProperties"]


def _held_bound(value: float, *, is_upper: bool, is_integer: bool) -> float | None:
    """Return the bound itself, or the next tighter one that the library holds; None where there is none."""
    if 0 < abs(value) < MIN_BOUND and is_upper == (value < 0):
        return MIN_BOUND if value > 0 else -MIN_BOUND
    if abs(value) <= MAX_BOUND:
        return value
    if is_upper != (value > 0):
        return None
    if is_integer and is_upper:
        return 2**63 - 1
    return MAX_BOUND if value > 0 else -MAX_BOUND


def _settle_divisors(schemas: Sequence[Schema], *, is_lenient: bool) -> None:
    num_states = num_remainders(schemas)
    if num_states > MAX_DIVISORS and is_lenient:
        for schema in schemas:
            schema.pop("multipleOf", None)
    elif num_states > MAX_DIVISORS:
        raise _wrong(
            f"multipleOf: the divisors of this schema have {min(num_states, 10**15)} remainders, and {MAX_DIVISORS} at "
            "most can be held"
        )


def _settle_name_patterns(schemas: Sequence[Schema], *, is_lenient: bool) -> None:
    patterned = [one for one in schemas if isinstance(one.get("patternProperties"), dict)]
    number = sum(len(one["patternProperties"]) for one in patterned)
    if number <= MAX_NAME_PATTERNS:
        return
    if not is_lenient:
        raise _wrong(
            f"patternProperties: this schema has {number} patterns of names, and {MAX_NAME_PATTERNS} at most can be held"
        )
    for one in patterned:
        del one["patternProperties"]
        one.pop("additionalProperties", None)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="grammar")
