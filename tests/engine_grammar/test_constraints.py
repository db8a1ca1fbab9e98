"""Annotations and constraints that forbid nothing are ignored; real ones are enforced, or rejected with their path."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import InvalidRequestError, KvbatonError
from contract.json_schema import plain_schema
from contract.sampling import Grammar
from tests.engine_grammar.answers import allowed_by, matcher_of, outcome_of, request_with
from tests.text.tiny_model import END, byte_ids, write_model

MAX_INT64, MIN_INT64, MAX_UINT64 = 2**63 - 1, -(2**63), 2**64 - 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def accepts(model: Path, schema: Any, answer: str) -> bool:
    """Return True if ``answer`` may be written and may end there."""
    matcher = matcher_of(model, request_with(Grammar("json_schema", json.dumps(schema)), max_tokens=300))
    try:
        matcher.advance(byte_ids(answer.encode()))
    except KvbatonError:
        return False
    return END in allowed_by(matcher)


def refusal_of(model: Path, schema: Any) -> str:
    outcome = outcome_of(model, request_with(Grammar("json_schema", json.dumps(schema))))
    assert isinstance(outcome, InvalidRequestError) and outcome.param == "grammar"
    return outcome.message


FORMATS = (
    "password byte binary int32 int64 float double idn-email idn-hostname uri-reference iri iri-reference uri-template "
    "json-pointer relative-json-pointer regex color url phone currency decimal html markdown base64 time-zone country "
    "semver slug ulid cuid nanoid mac port path file-path directory-path ipv4network ipv6network credit-card isbn unix-time"
)


@pytest.mark.parametrize("name", FORMATS.split())
def test_an_unknown_format_is_an_annotation(model: Path, name: str) -> None:
    """F14: 39 of 49 format names used to give status 400."""
    assert accepts(model, {"type": "string", "format": name}, '"any text"')


NOTHING: dict[str, tuple[Any, str]] = {
    "uniqueItems": ({"type": "array", "uniqueItems": False}, "[1,1]"),
    "uniqueItems of one": (
        {"type": "array", "uniqueItems": True, "maxItems": 1, "items": {"const": 1}},
        "[1]",
    ),
    "counts of 0": ({"type": "string", "minLength": 0}, '""'),
    "minItems": ({"type": "array", "minItems": 0}, "[]"),
    "whole numbers as floats": (
        {"type": "array", "minItems": 1.0, "maxItems": 1.0, "items": {"const": 1}},
        "[1]",
    ),
    "minProperties": ({"properties": {"a": {}}, "minProperties": 0}, "{}"),
    "minProperties that required implies": (
        {"type": "object", "properties": {"a": {"const": 1}, "b": {}}, "required": ["a"], "minProperties": 1},
        '{"a":1}',
    ),
    "maxProperties of a closed object": (
        {
            "type": "object",
            "properties": {"a": {}, "b": {}},
            "additionalProperties": False,
            "maxProperties": 2,
        },
        "{}",
    ),
    "required": ({"type": "object", "required": []}, "{}"),
    "not false": ({"type": "string", "not": False}, '""'),
    "if alone": ({"type": "string", "if": {"minLength": 3}}, '""'),
    "then alone": ({"type": "string", "then": {"minLength": 3}}, '""'),
    "no dependencies": ({"type": "object", "dependentRequired": {}, "dependentSchemas": {"a": True}}, "{}"),
    "contains none": ({"type": "array", "contains": {"const": 1}, "minContains": 0}, "[]"),
    "minContains alone": ({"type": "array", "minContains": 3}, "[]"),
    "propertyNames": ({"type": "object", "propertyNames": {}}, "{}"),
    "unevaluatedProperties": ({"type": "object", "unevaluatedProperties": True}, "{}"),
    "patternProperties": ({"type": "object", "patternProperties": {}}, "{}"),
    "additionalItems": ({"type": "array", "additionalItems": False, "items": {"const": 1}}, "[1,1]"),
    "content": ({"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"}, '"!"'),
    "contentSchema": ({"type": "string", "contentSchema": {"not": {}}}, '"!"'),
    "access": ({"type": "string", "readOnly": True, "writeOnly": True, "deprecated": True}, '"!"'),
    "default, examples": ({"type": "integer", "default": "x", "examples": ["y"], "example": {}}, "1"),
    "of OpenAPI": (
        {
            "type": "string",
            "xml": {},
            "externalDocs": {},
            "discriminator": {},
            "x-order": 1,
            "nullable": False,
        },
        '"!"',
    ),
    "unknown keywords": (
        {"type": "string", "options": {"not": 1}, "placeholder": "p", "x-guidance": {"lenient": True}},
        '""',
    ),
    "$comment, $vocabulary": (
        {"type": "string", "$comment": "c", "$vocabulary": {}, "$dynamicAnchor": "a"},
        '""',
    ),
    "a format of a number": ({"type": "integer", "format": "date"}, "7"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_keywords_that_forbid_nothing_are_ignored(model: Path, case: str) -> None:
    """F14: annotations used to count as constraints, and constraints that forbid nothing used to be rejected."""
    schema, answer = NOTHING[case]
    assert accepts(model, schema, answer)


BOUNDS: list[tuple[Any, list[str], list[str]]] = [
    (
        {"type": "integer", "minimum": MIN_INT64, "maximum": MAX_INT64},
        ["0", "-5", str(MAX_INT64)],
        [str(2**63)],
    ),
    ({"type": "integer", "minimum": 0, "maximum": MAX_UINT64}, ["0", str(MAX_INT64)], ["-1", str(2**64)]),
    (
        {"type": "integer", "minimum": -9.223372036854776e18, "maximum": 9.223372036854776e18},
        ["5"],
        [str(2**65)],
    ),
    ({"type": "integer", "exclusiveMinimum": MIN_INT64, "exclusiveMaximum": 2**63}, ["-7"], [str(-(2**65))]),
    ({"type": "number", "minimum": MIN_INT64, "maximum": MAX_INT64}, ["0.5", "-3"], [str(2**65)]),
    ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, ["0.5"], []),
    ({"type": "integer", "maximum": 10**400}, ["12345678901"], []),
    ({"minimum": 0, "maximum": MAX_UINT64}, ["7", '"text"'], ["-1"]),
]


@pytest.mark.parametrize("number", range(len(BOUNDS)))
def test_bounds_of_wide_integers_are_enforced(model: Path, number: int) -> None:
    """F14: the bounds of 64-bit integers, as generators write them, used to give status 400."""
    schema, good, bad = BOUNDS[number]
    assert [answer for answer in good if not accepts(model, schema, answer)] == []
    assert [answer for answer in bad if accepts(model, schema, answer)] == []


REAL: dict[str, tuple[Any, str]] = {
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "not": ({"type": "string", "not": {"const": "a"}}, "not"),
    "if": ({"if": {"type": "string"}, "then": {"minLength": 1}}, "if"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "dependentSchemas": ({"type": "object", "dependentSchemas": {"a": {"type": "null"}}}, "dependentSchemas"),
    "dependencies": ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies"),
    "contains": ({"type": "array", "contains": {"const": 1}}, "contains"),
    "propertyNames": (
        {"type": "object", "properties": {"b": {}}, "propertyNames": {"pattern": "^a"}},
        "propertyNames",
    ),
    "unevaluatedProperties": (
        {"allOf": [{"type": "object"}], "unevaluatedProperties": False},
        "unevaluatedProperties",
    ),
    "unevaluatedItems": ({"allOf": [{"prefixItems": [{}]}], "unevaluatedItems": False}, "unevaluatedItems"),
    "type": ({"type": ["string", "any"]}, "type"),
    "pattern, group": ({"type": "string", "pattern": "(?>a)"}, "pattern"),
    "$dynamicRef": ({"$dynamicRef": "#a"}, "$dynamicRef"),
    "pattern": ({"type": "string", "pattern": "^(?!a)"}, "pattern"),
    "pattern, word boundary": ({"type": "string", "pattern": "\\bfoo"}, "pattern"),
    "patternProperties": ({"type": "object", "patternProperties": {"(?<=a)b": {}}}, "patternProperties"),
    "minProperties": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1},
        "minProperties",
    ),
    "minimum": ({"type": "integer", "minimum": 2**70}, "minimum"),
}


@pytest.mark.parametrize("case", REAL)
@pytest.mark.parametrize("place", ["root", "property", "definition"])
def test_constraints_that_cannot_be_enforced_are_rejected_with_their_path(
    model: Path, case: str, place: str
) -> None:
    """F14: a real constraint is never dropped silently, and the error names its place."""
    schema, keyword = REAL[case]
    whole: Any
    match place:
        case "property":
            whole, path = {"properties": {"p": {"items": schema}}}, f"#/properties/p/items/{keyword}"
        case "definition":
            whole, path = {"$ref": "#/$defs/d", "$defs": {"d": schema}}, f"#/$defs/d/{keyword}"
        case _:
            whole, path = schema, f"#/{keyword}"
    message = refusal_of(model, whole)
    assert path in message and "coerce" not in message


def with_kind(kind: Any, **more: Any) -> Any:
    return {"type": "object", "properties": {"kind": kind, **more}, "required": ["kind"]}


ONE_OF: list[tuple[list[Any], str]] = [
    ([{"type": "string"}, {"type": "null"}], "null"),
    ([{"const": 1}, {"const": 2}], "2"),
    ([with_kind({"const": "a"}), with_kind({"enum": ["b", "c"]}, x={"const": 1})], '{"kind":"c","x":1}'),
    ([with_kind({"type": "string"}), with_kind({"type": "integer"})], '{"kind":1}'),
    ([{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], '{"kind":"b"}'),
]
DEFINITIONS = {"A": with_kind({"const": "a"}), "B": with_kind({"const": "b"})}


@pytest.mark.parametrize("number", range(len(ONE_OF)))
def test_one_of_is_enforced_if_no_value_matches_two_branches(model: Path, number: int) -> None:
    """F14: a union with a discriminating constant used to be rejected, advising an option that clients cannot set."""
    branches, answer = ONE_OF[number]
    assert accepts(model, {"oneOf": branches, "$defs": DEFINITIONS}, answer)


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "string"}, {"const": "a"}],
        [{"const": 1}, {"const": 1.0}],
        [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}],
        [{"type": "integer"}, {"type": "number"}],
        [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 3}],
    ],
)
def test_one_of_is_rejected_if_a_value_may_match_two_branches(model: Path, branches: list[Any]) -> None:
    """F14: the error proposes what to write instead."""
    message = refusal_of(model, {"oneOf": branches})
    assert "oneOf" in message and "write anyOf" in message and "coerce" not in message


@pytest.mark.parametrize("divisor", [100_003, 2**40, 10**400, 1e-9 * 123456789])
def test_divisors_are_bounded(model: Path, divisor: float) -> None:
    """H1: the library builds a state for each remainder: 270 MB and 7 s for 1,000,003."""
    assert "multipleOf" in refusal_of(model, {"type": "number", "multipleOf": divisor})
    several = {"allOf": [{"type": "integer", "multipleOf": number} for number in (101, 211, 307)]}
    assert "multipleOf" in refusal_of(model, several)


def test_divisors_are_found_behind_references(model: Path) -> None:
    """H1: only divisors below keywords used to be counted."""
    schema = {"$ref": "#/components/A", "components": {"A": {"type": "integer", "multipleOf": 100_003}}}
    assert "multipleOf" in refusal_of(model, schema)


@pytest.mark.parametrize("parts", [1, 13])
def test_patterns_of_property_names_are_bounded(model: Path, parts: int) -> None:
    """H1: the library compared 600 patterns with each other for minutes, and used up all threads that compile."""
    count = 65 // parts
    several = [
        {"type": "object", "patternProperties": {f"^p{part}_{i}$": {} for i in range(count)}}
        for part in range(parts)
    ]
    assert "65 patterns of names" in refusal_of(model, {"allOf": several})
    fewer = {"type": "object", "patternProperties": {f"^p{i}$": {"const": 1} for i in range(64)}}
    assert accepts(model, fewer, '{"p63":1}')
    lenient = json.loads(plain_schema(json.dumps({"anyOf": several}), is_lenient=True))
    assert lenient == {"anyOf": [{"type": "object"}] * parts}


@pytest.mark.parametrize("divisor", [0.01, 0.25, 5, 1000, 1e3, 60 * 60])
def test_usual_divisors_are_enforced(model: Path, divisor: float) -> None:
    assert accepts(model, {"type": "number", "multipleOf": divisor}, "0")


names = st.sampled_from(["a", "b", "title", "default", "not", "$ref", "x"])
notes = st.dictionaries(
    st.sampled_from(
        ["title", "description", "$comment", "default", "examples", "deprecated", "x-any", "format"]
    ),
    st.sampled_from(["text", "password"]),
    max_size=3,
)
leaves = st.sampled_from(
    [
        {"type": "string"},
        {"type": "integer", "minimum": 0},
        {"enum": ["title", 1]},
        {"const": {"title": 1}},
        True,
    ]
)


def composed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.dictionaries(names, inner, max_size=3).map(
        lambda found: {"type": "object", "properties": found}
    )
    return (
        objects
        | inner.map(lambda one: {"type": "array", "items": one})
        | inner.map(lambda one: {"anyOf": [one]})
    )


schemas = st.recursive(leaves, composed, max_leaves=6)


@given(schemas, st.data())
@settings(max_examples=60, deadline=None)
def test_annotations_do_not_change_the_constraints(schema: Any, data: st.DataObject) -> None:
    """F14: added annotations never change the reduced schema, and reducing it again changes nothing."""

    def annotated(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        out = {**value}
        if isinstance(value.get("properties"), dict):
            out["properties"] = {name: annotated(one) for name, one in value["properties"].items()}
        if "items" in value:
            out["items"] = annotated(value["items"])
        if "anyOf" in value:
            out["anyOf"] = [annotated(one) for one in value["anyOf"]]
        return {**data.draw(notes), **out}

    plain = plain_schema(json.dumps(schema))
    assert plain_schema(json.dumps(annotated(schema), indent=4)) == plain == plain_schema(plain)
    assert json.loads(plain) == schema
