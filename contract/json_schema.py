"""Reduces JSON schemas to their constraints, in a form that the grammar library supports.

Workers measure and compile only the constraints. Annotations, unknown keywords, unknown formats and constraints that forbid
nothing are removed; generators express the same constraint in several ways, of which one is kept. A bound that the library
does not support becomes the next tighter one that it does; any other unsupported constraint is refused by its path. Every
value that matches the result matches the schema.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import quote

from contract.errors import InvalidRequestError
from contract.sampling import MAX_GRAMMAR_BYTES, Grammar
from contract.schema_constraints import COUNTS, LOWER, UPPER, Constraints, Pointer, wrong_schema
from contract.schema_unions import Unions
from contract.schema_values import References, Schema, properties_of, values_of

# In one document: the library compares each with all others, and took minutes for 600.
MAX_NAME_PATTERNS = 64

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
_MOST = ("maxItems", "maxLength", "maxProperties")
# As a maximum it forbids nothing.
_NO_ANSWER_HAS = 2**31
_SPEAKS_OF_ITEMS = frozenset(("allOf", "anyOf", "oneOf", "$ref", "if", "contains", "dependentSchemas"))
_OF_NAMES = frozenset(("pattern", "minLength", "maxLength"))
_BINDS_NAMES = _OF_NAMES | {"enum", "const", "type", "format", "not", "allOf", "anyOf", "oneOf", "$ref", "if"}
_IN_REFERENCES = "!#$%&'()*+,/:;=?@~"
# Of the sum of all ``multipleOf``, in units of their last digits: the library makes a state of each remainder.
MAX_DIVISORS = 20_000
_PARTS = frozenset(("$ref", "anyOf", "oneOf"))
# With its annotations, which workers do not get.
MAX_SCHEMA_BYTES = 4 * MAX_GRAMMAR_BYTES


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
            root = json.loads(text, parse_constant=no_number)
            if isinstance(root, dict):
                reducer = _Reducer(root, is_lenient=is_lenient)
                root = reducer.reduced(root, ())
                schemas += reducer.schemas
            documents.append(root)
        _settle_divisors(schemas, is_lenient=is_lenient)
        _settle_name_patterns(schemas, is_lenient=is_lenient)
        written = [json.dumps(one, ensure_ascii=False, separators=(",", ":")) for one in documents]
        # Half of a surrogate pair is valid JSON, but the schema is sent as UTF-8.
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
        unions = Unions(self._references.resolve)
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
            # Generators write values of a wrong type, such as ``"properties": []``, which constrain nothing.
            spelled_out = {
                key: value for key, value in spelled_out.items() if key not in _FORMS or _FORMS[key](value)
            }
            for key in _NAMED & spelled_out.keys():
                spelled_out[key] = {name: one for name, one in spelled_out[key].items() if _is_schema(one)}
        if "propertyNames" in spelled_out:
            names = self._references.resolve(spelled_out["propertyNames"])
            spelled_out = closed_names(spelled_out, names) or spelled_out
        out: Schema = {}
        for key, value in spelled_out.items():
            place = (*at, key)
            is_path = self._references.leads_to_target(own, key)
            if key in _DEFINITIONS and self._references.are_all_pointers:
                out |= {key: self._reduce_path(own, key, value, place)} if is_path else {}
            elif key in _KEPT:
                out[key] = self._kept(key, value, place)
            elif is_path:
                out[key] = self._reduce_path(own, key, value, place)
        self._constraints.settle(spelled_out, out, at)
        self.schemas.append(out)
        return out

    def _kept(self, key: str, value: Any, place: Pointer) -> Any:
        if key in _LISTS and isinstance(value, list):
            return [self.reduced(one, (*place, str(i))) for i, one in enumerate(value)]
        if key in _MAPS and isinstance(value, dict):
            return {name: self.reduced(one, (*place, name)) for name, one in value.items()}
        return self.reduced(value, place) if key in _ONE_SCHEMA else value

    def _reduce_path(self, parent: int, key: str, value: Any, at: Pointer) -> Any:
        """Reduce a part of the document that is not a keyword but leads to the target of a reference."""
        if (parent, key) in self._references.targets or not isinstance(value, dict):
            return self.reduced(value, at)
        return {
            name: self._reduce_path(id(value), name, inner, (*at, name))
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
            # Targets of references may be behind any other key.
            waiting += [((*at, key), one) for key, one in schema.items() if key not in _KEPT]


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
    """Drop or refuse all ``multipleOf`` if their divisors have more than ``MAX_DIVISORS`` remainders."""
    divisors = {divisor for schema in schemas if (divisor := _divisor(schema.get("multipleOf")))}
    if not divisors:
        return
    num_states = sum(int(divisor.scaleb(-min(0, _exponent(divisor)))) for divisor in divisors)
    # Beyond the limit it need not be exact.
    if num_states <= MAX_DIVISORS and any(map(_combines, schemas)):
        exponent = min(0, *(_exponent(divisor) for divisor in divisors))
        num_states = max(num_states, math.lcm(*(int(divisor.scaleb(-exponent)) for divisor in divisors)))
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
        # Without the patterns it would forbid the names that they allow.
        one.pop("additionalProperties", None)


def no_number(name: str) -> Any:
    """Raise ValueError for NaN and infinities, which Python reads and JSON does not have."""
    raise ValueError(f"{name} is not a number of JSON")


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


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and (isinstance(value, int) or value.is_integer())


_NAMED = frozenset(("properties", "patternProperties"))
# The valid values of each keyword: draft 4 allows booleans as exclusive bounds, and lists as ``items``.
_FORMS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_NAMED, lambda value: isinstance(value, dict)),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _are_schemas),
    **dict.fromkeys(("additionalProperties", "additionalItems", "propertyNames"), _is_schema),
    **dict.fromkeys(("pattern", "format", "$ref"), lambda value: isinstance(value, str)),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), _is_number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), lambda value: isinstance(value, int | float)),
    **dict.fromkeys(("minItems", "minLength", "minProperties", *_MOST), _is_count),
    "items": lambda value: _is_schema(value) or _are_schemas(value),
    "enum": lambda value: isinstance(value, list) and bool(value),
    "required": lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
}


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


def _combines(schema: Schema) -> bool:
    """Return True if several schemas in it constrain one value, so that their divisors multiply."""
    parts = schema.get("allOf")
    num_parts = len(parts) if isinstance(parts, list) else 0
    num_others = len(_PARTS & schema.keys())
    return num_parts + num_others + ("multipleOf" in schema) > 1 or "patternProperties" in schema


def _divisor(value: Any) -> Decimal | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return abs(Decimal(repr(value))).normalize() or None


def _exponent(number: Decimal) -> int:
    return int(number.as_tuple().exponent)


def reduced(grammar: Grammar) -> Grammar:
    """Return the grammar without parts that do not constrain the answer.

    Raises InvalidRequestError about ``grammar`` for a schema that is longer than ``MAX_SCHEMA_BYTES``, is not valid, or has
    unsupported constraints.
    """
    if grammar.kind != "json_schema":
        return grammar
    num_bytes = len(grammar.text.encode(errors="surrogatepass"))
    if num_bytes > MAX_SCHEMA_BYTES:
        raise InvalidRequestError(
            f"the schema has {num_bytes} bytes with its annotations; the limit is {MAX_SCHEMA_BYTES}",
            param="grammar",
        )
    return Grammar("json_schema", plain_schema(grammar.text))
