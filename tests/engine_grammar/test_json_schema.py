"""Objects that may have only the properties that a schema names, and objects that may have more."""

import json
from pathlib import Path
from typing import Any

import pytest

from contract.errors import InternalError
from contract.sampling import Grammar
from engine.grammar.llguidance_matcher import with_closed_objects
from tests.engine_grammar.answers import allowed_by, matcher_of, request_with
from tests.text.tiny_model import END, byte_ids, write_model

NUMBER = {"type": "integer"}
A = {"type": "object", "properties": {"a": NUMBER}}
B = {"type": "object", "properties": {"b": NUMBER}}

CLOSED: dict[str, tuple[Any, str, str]] = {
    "an object": (A, '{"a":1}', '{"a":1,'),
    "none is required": (A, "{}", '{"b'),
    "within an object": ({"properties": {"in": A}, "required": ["in"]}, '{"in":{"a":1}}', '{"in":{"a":1,'),
    "within a list": ({"type": "array", "items": A}, '[{"a":1},{}]', '[{"b'),
    "within a tuple": ({"type": "array", "prefixItems": [A, B]}, '[{"a":1},{"b":2}]', '[{"a":1},{"a'),
    "one of several": ({"anyOf": [A, B]}, '{"b":1}', '{"b":1,'),
    "by its name": ({"$ref": "#/$defs/A", "$defs": {"A": A}}, '{"a":1}', '{"b'),
    "by a name beside the keywords": (
        {"$ref": "#/components/schemas/A", "components": {"schemas": {"A": A}}},
        '{"a":1}',
        '{"b',
    ),
    "of additional properties": (
        {"type": "object", "additionalProperties": A},
        '{"x":{"a":1},"y":{}}',
        '{"x":{"b',
    ),
    "names by a pattern": (
        {"type": "object", "patternProperties": {"^[a-z]$": NUMBER}},
        '{"a":1,"b":2}',
        '{"A',
    ),
    "a property called properties": (
        {"type": "object", "properties": {"properties": A}},
        '{"properties":{"a":1}}',
        '{"properties":{"b',
    ),
}
OPEN: dict[str, tuple[Any, str]] = {
    "it allows all others": ({**A, "additionalProperties": True}, '{"a":1,"b":[2]}'),
    "it allows others of one type": ({**A, "additionalProperties": {"type": "string"}}, '{"a":1,"b":"c"}'),
    "it names no properties": ({"type": "object"}, '{"a":1}'),
    "it requires a property without naming it": ({**A, "required": ["c"]}, '{"a":1,"c":2}'),
    "it requires more properties than it names": (
        {**A, "required": ["a"], "minProperties": 2},
        '{"a":1,"b":2}',
    ),
    "it requires a name that a pattern may match": (
        {"type": "object", "patternProperties": {"^a": NUMBER}, "required": ["b"]},
        '{"b":"c","a":1}',
    ),
    "it is two together": ({"allOf": [A, B]}, '{"a":1,"b":2}'),
    "it has alternatives beside": ({**A, "anyOf": [B, {"type": "object"}]}, '{"a":1,"b":2}'),
    "it adds to another": ({**A, "$ref": "#/$defs/B", "$defs": {"B": B}}, '{"a":1,"b":2}'),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def accepts(model: Path, schema: Any, answer: str) -> bool:
    """Return True if ``answer`` may be written and may end there."""
    matcher = matcher_of(model, request_with(Grammar("json_schema", json.dumps(schema))))
    matcher.advance(byte_ids(answer.encode()))
    return END in allowed_by(matcher)


@pytest.mark.parametrize("case", CLOSED)
def test_an_object_has_only_the_named_properties(model: Path, case: str) -> None:
    schema, whole, other = CLOSED[case]
    assert accepts(model, schema, whole)
    with pytest.raises(InternalError):
        accepts(model, schema, other)


@pytest.mark.parametrize("case", OPEN)
def test_an_object_may_have_other_properties_if_allowed(model: Path, case: str) -> None:
    schema, whole = OPEN[case]
    assert accepts(model, schema, whole)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[" * 100_000,
        '{"properties": {"a": ' * 5000 + "true" + "}}" * 5000,
        '{"maximum": 1' + "0" * 5000 + "}",
        '{"properties": 3, "items": 4, "anyOf": 5, "required": "a"}',
        '{"properties": {"a": true}, "required": 3}',
        '{"properties": {"a": true}, "required": [[]]}',
    ],
)
def test_invalid_schemas_are_passed_to_the_library(text: str) -> None:
    closed = with_closed_objects(text)
    assert closed == text or json.loads(closed) == json.loads(text)
