"""JSON schemas reduced to what constrains an answer, in a form that the grammar library takes.

Annotations, keywords that JSON Schema does not define, names of unknown formats and constraints that forbid nothing are
left out; a bound that the library cannot hold becomes the next tighter one that it can; a constraint that cannot be held
at all is refused by its path. What matches the result matches the schema.
"""

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from contract.errors import InvalidRequestError
from contract.schema_values import Disjointness, properties_of, required_of, types_of

Pointer = tuple[str, ...]
Schema = dict[str, Any]

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""The formats that are enforced; others are annotations."""
MAX_BOUND = 2**63 - 1024
"""The largest number up to which the library holds bounds, and which a double holds exactly."""
MAX_DIVISORS = 20_000
"""What all ``multipleOf`` may be together, in units of their last digits: the library makes a state for each remainder."""

_ONE_SCHEMA = ("additionalProperties", "items", "additionalItems")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_DEFINITIONS = ("$defs", "definitions")
_UPPER, _LOWER = ("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")
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
    try:
        root = json.loads(text)
        if not isinstance(root, dict):
            return json.dumps(root)
        reduced = _Reducer(root, is_lenient=is_lenient).reduced(root, ())
        _check_divisors(reduced)
        return json.dumps(reduced, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise _wrong(f"the json_schema is not valid JSON, or too deep: {error}"[:300]) from error


class _Reducer:
    """Reduces the schemas of one document. Keeps what its references point to, wherever that stands."""

    def __init__(self, root: Schema, *, is_lenient: bool) -> None:
        self._root = root
        self._is_lenient = is_lenient
        self._targets: set[Pointer] = set()
        self._ways: set[Pointer] = set()
        self._ends: dict[str, Any] = {}
        self._disjointness = Disjointness()
        self._are_all_pointers = True
        for reference in set(_references(root)):
            self._are_all_pointers &= reference == "#" or reference.startswith("#/")
            pointer = _pointer(reference)
            if _found(root, pointer) is not None:  # else it leads nowhere, however long it is
                self._targets.add(pointer)
                while pointer and pointer not in self._ways:
                    self._ways.add(pointer)
                    pointer = pointer[:-1]

    def reduced(self, schema: Any, at: Pointer) -> Any:
        """Return what ``schema``, which stands at ``at``, constrains."""
        if not isinstance(schema, dict):
            return schema
        out: Schema = {}
        for key, value in schema.items():
            place = (*at, key)
            if key in _DEFINITIONS and self._are_all_pointers:
                out |= {key: self._way(value, place)} if place in self._ways else {}
            elif key in _KEPT:
                out[key] = self._kept(key, value, place)
            elif place in self._ways:
                out[key] = self._way(value, place)
        self._refuse(schema, out, at)
        _make_bounds_plain(out, at)
        _drop_what_forbids_nothing(out)
        self._refuse_patterns(out, at)
        self._refuse_counts(out, at)
        self._settle_one_of(out)
        return out

    def _kept(self, key: str, value: Any, place: Pointer) -> Any:
        if key in _LISTS and isinstance(value, list):
            return [self.reduced(one, (*place, str(i))) for i, one in enumerate(value)]
        if key in _MAPS and isinstance(value, dict):
            return {name: self.reduced(one, (*place, name)) for name, one in value.items()}
        return self.reduced(value, place) if key in _ONE_SCHEMA else value

    def _way(self, value: Any, place: Pointer) -> Any:
        """Reduce a part of the document that is no keyword but leads to the target of a reference."""
        if place in self._targets or not isinstance(value, dict):
            return self.reduced(value, place)
        return {
            key: self._way(inner, (*place, key))
            for key, inner in value.items()
            if (*place, key) in self._ways
        }

    def _refuse(self, schema: Schema, out: Schema, at: Pointer) -> None:
        """Raise InvalidRequestError for a constraint that is dropped, unless it forbids nothing or that is allowed."""
        if _closes_itself(schema):
            out["additionalProperties"] = False
            return
        for key in schema:
            if key in _CANNOT_HOLD and not _forbids_nothing(key, schema) and not self._is_lenient:
                raise _wrong(
                    f"{shown((*at, key))}: the constraint {key} cannot be held while an answer is written; remove it"
                )

    def _refuse_patterns(self, out: Schema, at: Pointer) -> None:
        patterns = out.get("patternProperties")
        given = [("pattern", out.get("pattern"))]
        given += [("patternProperties", one) for one in (patterns if isinstance(patterns, dict) else ())]
        for key, pattern in given:
            found = _looking_around(pattern) if isinstance(pattern, str) else None
            if found and self._is_lenient:
                out.pop(key, None)
            elif found:
                raise _wrong(f"{shown((*at, key))}: {found} in a pattern cannot be held; write it without")

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
        if not isinstance(branches, list) or "anyOf" in out:
            return
        if self._is_lenient or self._disjointness.are_disjoint([self._resolved(one) for one in branches]):
            out["anyOf"] = out.pop("oneOf")

    def _resolved(self, schema: Any) -> Any:
        """Follow references within the document, as far as they lead."""
        passed: dict[str, None] = {}
        while isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
            if reference in self._ends:
                schema = self._ends[reference]
                break
            if reference in passed or not reference.startswith("#"):
                break
            passed[reference] = None
            schema = _found(self._root, _pointer(reference))
        self._ends |= dict.fromkeys(passed, schema)
        return schema


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
        case "not":
            return value is False
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


def _make_bounds_plain(out: Schema, at: Pointer) -> None:
    for key in _COUNTS:
        value = out.get(key)
        if isinstance(value, float) and value.is_integer():
            out[key] = int(value)
    for key in (*_UPPER, *_LOWER):
        value = out.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > MAX_BOUND:
            is_upper = key in _UPPER
            if is_upper != (value > 0):
                raise _wrong(f"{shown((*at, key))}: bounds are held between -{MAX_BOUND} and {MAX_BOUND}")
            is_integer = out.get("type") == "integer" and is_upper
            out[key] = 2**63 - 1 if is_integer else MAX_BOUND if value > 0 else -MAX_BOUND


_ESCAPES_AND_GROUPS = re.compile(r"\\(.)|\[(?:\\.|[^\]\\])*+\]?|(\(\?<?[=!])", re.DOTALL)
"""A bracket that is not closed takes the rest, since looking for the end of each would take quadratic time."""


def _looking_around(pattern: str) -> str | None:
    """Return what looks around in a pattern, or back at what was matched: no automaton does that."""
    for match in _ESCAPES_AND_GROUPS.finditer(pattern):
        escaped, group = match.groups()
        if group or (escaped and escaped in "bBk123456789"):
            return group or f"\\{escaped}"
    return None


def _check_divisors(root: Schema) -> None:
    schemas = list(schemas_within(root))
    divisors = [divisor for schema in schemas if (divisor := _divisor(schema.get("multipleOf")))]
    if not divisors:
        return
    exponent = min(0, *(_exponent(divisor) for divisor in divisors))
    are_combined = any(_IN_PLACE & schema.keys() for schema in schemas)
    num_states, together = 0, 1
    for divisor in divisors:
        num_states += int(divisor.scaleb(-min(0, _exponent(divisor))))
        together = math.lcm(together, int(divisor.scaleb(-exponent))) if are_combined else 1
        if max(num_states, together) > MAX_DIVISORS:  # numbers of many digits are not worth their time
            break
    num_states = max(num_states, together)
    if num_states > MAX_DIVISORS:
        raise _wrong(
            f"multipleOf: the divisors of this schema have {min(num_states, 10**15)} remainders, and {MAX_DIVISORS} at "
            "most can be held"
        )


def _divisor(value: Any) -> Decimal | None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return abs(Decimal(repr(value))).normalize() or None


def _exponent(number: Decimal) -> int:
    return int(number.as_tuple().exponent)


def _references(root: Any) -> Iterator[str]:
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
            reference = value.get("$ref")
            if isinstance(reference, str):
                yield reference


def _pointer(reference: str) -> Pointer:
    parts = unquote(reference.removeprefix("#")).split("/")[1:]
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in parts)


def _found(root: Any, pointer: Pointer) -> Any:
    """Return what stands there; None where nothing does."""
    for part in pointer:
        if isinstance(root, dict):
            root = root.get(part)
        elif isinstance(root, list) and part.isdecimal() and int(part) < len(root):
            root = root[int(part)]
        else:
            return None
    return root


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="grammar")
