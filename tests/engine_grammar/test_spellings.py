"""Schemas as generators write them: equivalent spellings of a constraint are enforced, not rejected."""

import json
from pathlib import Path
from typing import Any

import pytest

from contract.errors import InvalidRequestError, KvbatonError
from contract.sampling import Grammar
from contract.schema_constraints import rust_pattern
from tests.engine_grammar.answers import allowed_by, matcher_of, outcome_of, request_with
from tests.text.tiny_model import END, byte_ids, write_model

Case = tuple[Any, list[Any], list[Any]]
"""A schema, values that match it, and values that do not."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def accepts(model: Path, schema: Any, value: Any) -> bool:
    """Return True if ``value`` may be written."""
    matcher = matcher_of(model, request_with(Grammar("json_schema", json.dumps(schema)), max_tokens=300))
    try:
        matcher.advance(byte_ids(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()))
    except KvbatonError:
        return False
    return matcher.is_complete or END in allowed_by(matcher)


def check(model: Path, case: Case) -> None:
    schema, good, bad = case
    assert [value for value in good if not accepts(model, schema, value)] == []
    assert [value for value in bad if accepts(model, schema, value)] == []


def mapped(names: Any, **more: Any) -> Any:
    """Return the schema of an object that maps such names to integers."""
    return {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}, **more}


COLOURS = {"Colour": {"enum": ["red", "green"], "title": "Colour", "type": "string"}}
SPELLINGS: dict[str, Case] = {
    "names of any kind": (mapped({"type": "string"}), [{"a": 1}, {}], [{"a": "b"}]),
    "names of a list": (mapped({"enum": ["a", "b"]}), [{"a": 1}, {"a": 1, "b": 2}], [{"c": 1}, {"a": "x"}]),
    "names of a list, all of them": (
        mapped({"type": "string", "enum": ["a", "b"]}, required=["a", "b"]),
        [{"a": 1, "b": 2}],
        [{"a": 1}],
    ),
    "one name": (mapped({"const": "a"}), [{"a": 1}], [{"b": 1}]),
    "names by a reference": (
        {**mapped({"$ref": "#/$defs/Colour"}), "$defs": COLOURS},
        [{"red": 1}],
        [{"blue": 1}],
    ),
    "names by a pattern": (mapped({"pattern": "^x-"}), [{"x-a": 1}], [{"a": 1}, {"x-a": "b"}]),
    "names by their length": (
        mapped({"minLength": 1, "maxLength": 2}),
        [{"a": 1}, {"é\n": 1}],
        [{"": 1}, {"abc": 1}],
    ),
    "names of named properties": (
        {"type": "object", "properties": {"a": {"type": "string"}}, "propertyNames": {"enum": ["a", "b"]}},
        [{"a": "x"}, {"b": [1]}],
        [{"c": 1}, {"a": 1}],
    ),
    "never": ({"anyOf": [{"not": {}}, {"type": "string"}]}, ["a"], [1]),
    "never, as true": (
        {"type": "object", "properties": {"a": {"not": True}, "b": {}}},
        [{"b": 1}],
        [{"a": 1}],
    ),
    "no other properties": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"not": {}}},
        [{"a": 1}],
        [{"b": 1}],
    ),
    "not: a value that is excluded anyway": ({"type": "string", "not": {"type": "null"}}, ["a"], [None]),
    "not: another constant": ({"enum": ["a", "b"], "not": {"enum": ["c"]}}, ["a"], ["c"]),
    "a closed tuple": (
        {"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
        [[1], []],
        [[1, 2]],
    ),
    "no further items in a list": (
        {"type": "array", "items": {"const": 1}, "unevaluatedItems": False},
        [[1, 1]],
        [[2]],
    ),
    "null for a missing property": (
        {
            "type": "object",
            "properties": {"a": {"type": "string", "minLength": None, "pattern": None, "enum": None}},
            "required": None,
            "additionalProperties": None,
            "$defs": None,
            "items": None,
        },
        [{"a": "x"}, {}],
        [{"b": 1}],
    ),
    "the constant null": ({"const": None}, [None], [1]),
    "counts larger than any answer": (
        {"type": "array", "maxItems": 2**64, "items": {"type": "string", "maxLength": 2**63 - 1}},
        [["a"]],
        [[1]],
    ),
    "the smallest double": ({"type": "number", "minimum": 5e-324}, [1, 0.5], [0, -1]),
    "the largest double below 0": ({"type": "number", "exclusiveMaximum": -5e-324}, [-1], [0, 1]),
    "a reference that is no URI": (
        {"$ref": "#/$defs/List[ä]", "$defs": {"List[ä]": {"type": "integer"}}},
        [1],
        ["a"],
    ),
    "a reference with a percent sign": ({"$ref": "#/$defs/100%", "$defs": {"100%": {"const": 1}}}, [1], [2]),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_equivalent_spellings_are_enforced(model: Path, name: str) -> None:
    """F14: schemas that zod, pydantic and others write used to give status 400."""
    check(model, SPELLINGS[name])


def kind(name: str, *required: str, **properties: Any) -> Any:
    """Return an object schema as pydantic writes it, whose ``kind`` has a default and so is not required."""
    own = {"kind": {"const": name, "default": name, "type": "string"}, **properties}
    return {"type": "object", "properties": own, "required": list(required)}


UNIONS: dict[str, Case] = {
    "a discriminator": (
        {
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            "discriminator": {
                "propertyName": "kind",
                "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"},
            },
            "$defs": {"Cat": kind("cat", "lives", lives={"type": "integer"}), "Dog": kind("dog")},
        },
        [{"kind": "cat", "lives": 9}, {"kind": "dog"}],
        [{}, {"lives": 9}, {"kind": "cow"}],
    ),
    "a constant alone": ({"oneOf": [kind("a"), kind("b")]}, [{"kind": "b"}], [{}]),
    "constants by references": (
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"$ref": "#/$defs/A"}}, "required": ["k"]},
                {
                    "type": "object",
                    "properties": {"k": {"allOf": [{"$ref": "#/$defs/B"}]}},
                    "required": ["k"],
                },
            ],
            "$defs": {"A": {"const": "a"}, "B": {"enum": ["b", "c"]}},
        },
        [{"k": "a"}, {"k": "c"}],
        [{"k": "d"}],
    ),
    "a union in a union": (
        {"oneOf": [{"oneOf": [kind("a"), kind("b")]}, kind("c"), {"type": "null"}]},
        [{"kind": "a"}, {"kind": "c"}, None],
        [{}],
    ),
    "many constants": ({"oneOf": [{"const": i} for i in range(500)]}, [499], [500]),
}


@pytest.mark.parametrize("name", UNIONS)
def test_a_union_is_discriminated_by_a_property(model: Path, name: str) -> None:
    """F14: pydantic leaves a discriminator with a default out of ``required``; oneOf used to be rejected then."""
    check(model, UNIONS[name])


def test_a_union_without_discriminator_is_not_closed(model: Path) -> None:
    """F14: closed branches made the library choose by their keys, although an answer matched both as written."""
    branches: list[Any] = [
        {"type": "object", "properties": {"a": {}}, "required": ["a"]},
        {"type": "object", "properties": {}},
    ]
    schema = {"oneOf": branches}
    outcome = outcome_of(model, request_with(Grammar("json_schema", json.dumps(schema))))
    assert isinstance(outcome, InvalidRequestError) and "write anyOf" in outcome.message


PATTERNS: list[tuple[str, list[str], list[str]]] = [
    (r"^[^[\]]*$", ["ab", ""], ["[", "]"]),
    (r"^[a&&b~~]+$", ["a&b", "~"], ["c"]),
    (r"^[+--]$", ["+", ",", "-"], ["."]),
    (r"^[--/]$", ["-", ".", "/"], [","]),
    (r"^[\w-.]+$", ["a-b.c"], ["a b"]),
    (r"^[a-\d]$", ["a", "-", "7"], ["b"]),
    (r"^[^^]$", ["a"], ["^"]),
    (r"^[[:alpha:]]$", [":]", "p]"], ["b", "a"]),
    (r"^{{a}}$", ["{{a}}"], ["a"]),
    (r"^a{,2}$", ["a{,2}"], ["aa"]),
    (r"^\{a{1,2}\}$", ["{a}", "{aa}"], ["{aaa}"]),
    (r"^\cA[\b\0]$", ["\x01\x08", "\x01\0"], ["\x01b"]),
    (r"^\<a\>$", ["<a>"], ["a"]),
    (r"\Aa\Z", ["a"], ["ab"]),
    (r"^\p{L}[\p{Lu}-]$", ["é-", "aB"], ["1-", "ab"]),
    (r"^[^]$", ["a", "\n"], [""]),
    (r"^\x41\u0042$", ["AB"], ["ab"]),
]


@pytest.mark.parametrize("number", range(len(PATTERNS)))
def test_patterns_follow_ecmascript(model: Path, number: int) -> None:
    """F14: ``[``, ``--`` and ``&&`` have more meanings in the library's patterns, and braces fewer."""
    pattern, good, bad = PATTERNS[number]
    check(model, ({"type": "string", "pattern": pattern}, good, bad))
    check(
        model,
        (
            {"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False},
            [{name: 1} for name in good],
            [{name: 1} for name in bad],
        ),
    )


@pytest.mark.parametrize("pattern", [pattern for pattern, _, _ in PATTERNS])
def test_patterns_are_rewritten_once(pattern: str) -> None:
    """Routers and workers reduce a schema one after the other, so a second reduction must not change it."""
    assert rust_pattern(rust_pattern(pattern)) == rust_pattern(pattern)
