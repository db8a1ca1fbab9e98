"""Values of parameters by the tool's schema, in all forms of such schemas."""

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.parsing.cutting import parse
from text.parsing.tagged import QwenParser

INTEGER, NULL = {"type": "integer"}, {"type": "null"}
DEFS = {
    "Count": INTEGER,
    "Far": {"$ref": "#/$defs/Count"},
    "Place": {"type": "object", "properties": {"x": INTEGER}},
    "Level": {"enum": [1, 2, 3]},
    "Self": {"anyOf": [{"$ref": "#/$defs/Self"}, INTEGER]},
    "Loop": {"$ref": "#/$defs/Loop"},
    "named": {"$anchor": "here", "type": "integer"},
    "by id": {"$id": "https://example.com/count", "type": "integer"},
    "a/b~c d": INTEGER,
}
SPELLINGS: dict[str, tuple[Any, str, Any]] = {
    "a reference": ({"$ref": "#/$defs/Count"}, "5", 5),
    "a reference to a reference": ({"$ref": "#/$defs/Far"}, "5", 5),
    "a reference of draft 7": ({"$ref": "#/definitions/Old"}, "5", 5),
    "an escaped reference": ({"$ref": "#/$defs/a~1b~0c%20d"}, "5", 5),
    "a reference to an anchor": ({"$ref": "#here"}, "5", 5),
    "a reference to an id": ({"$ref": "https://example.com/count"}, "5", 5),
    "a reference into another property": ({"$ref": "#/properties/other"}, "5", 5),
    "a reference into a list": ({"$ref": "#/properties/listed/anyOf/0"}, "5", 5),
    "a reference to an object": ({"$ref": "#/$defs/Place"}, '{"x": 1}', {"x": 1}),
    "a reference to nothing": ({"$ref": "#/$defs/None"}, "5", "5"),
    "a reference elsewhere": ({"$ref": "https://example.com/else"}, "5", "5"),
    "a cycle beside a type": ({"$ref": "#/$defs/Self"}, "5", 5),
    "a cycle of nothing": ({"$ref": "#/$defs/Loop"}, "5", "5"),
    "enum": ({"enum": [1, 2]}, "2", 2),
    "enum by reference": ({"$ref": "#/$defs/Level"}, "3", 3),
    "enum of strings": ({"enum": ["1", "2"]}, "2", "2"),
    "enum of several types": ({"enum": [1, "auto", None, True]}, "1", 1),
    "enum of several types, a string": ({"enum": [1, "auto", None]}, "auto", "auto"),
    "enum of several types, null": ({"enum": [1, "auto", None]}, "null", None),
    "enum of several types, true": ({"enum": [1, "auto", True]}, "True", True),
    "enum of objects": ({"enum": [{"a": 1}, "x"]}, '{"a": 1}', {"a": 1}),
    "enum with a type": ({"type": "string", "enum": ["1", "2"]}, "1", "1"),
    "const": ({"const": 7}, "7", 7),
    "const string": ({"const": "7"}, "7", "7"),
    "const false": ({"const": False}, "false", False),
    "const null": ({"const": None}, "null", None),
    "consts": ({"oneOf": [{"const": 1, "title": "One"}, {"const": "2"}]}, "1", 1),
    "allOf": ({"allOf": [{"$ref": "#/$defs/Count"}], "description": "How many."}, "5", 5),
    "allOf of several": ({"allOf": [{"type": ["integer", "string"]}, {"type": ["integer", "null"]}]}, "5", 5),
    "allOf that narrows a number": ({"allOf": [{"type": "number"}, INTEGER]}, "5", 5),
    "anyOf": ({"anyOf": [INTEGER, NULL]}, "5", 5),
    "anyOf, null": ({"anyOf": [{"$ref": "#/$defs/Count"}, NULL]}, "null", None),
    "anyOf beside allOf": ({"anyOf": [{"allOf": [{"$ref": "#/$defs/Count"}]}, NULL]}, "5", 5),
    "oneOf": ({"oneOf": [{"$ref": "#/$defs/Place"}, {"type": "array"}]}, "[1]", [1]),
    "anyOf within anyOf": ({"anyOf": [{"anyOf": [INTEGER, {"type": "number"}]}, NULL]}, "1.5", 1.5),
    "then and else": ({"if": {}, "then": INTEGER, "else": {"type": "boolean"}}, "5", 5),
    "a list of types": ({"type": ["integer", "null"]}, "5", 5),
    "a list of one type": ({"type": ["string"]}, "5", "5"),
    "nullable": ({"type": "integer", "nullable": True}, "null", None),
    "nullable string": ({"type": "string", "nullable": True}, "null", None),
    "capitals": ({"type": "INTEGER"}, "5", 5),
    "Python's names": ({"type": "dict"}, '{"a": 1}', {"a": 1}),
    "bounds alone": ({"minimum": 1}, "5", 5),
    "bounds beside null": ({"anyOf": [INTEGER, NULL], "minimum": 1}, "null", None),
    "items alone": ({"items": INTEGER}, "[5]", [5]),
    "a format alone": ({"format": "date"}, "[5]", "[5]"),
    "true": (True, "5", "5"),
    "what contradicts itself": ({"allOf": [{"type": "string"}, INTEGER]}, "5", "5"),
    "nonsense": ({"type": 5, "enum": "x", "allOf": 7, "$ref": 3, "anyOf": {}}, "5", "5"),
}
ROOTS: dict[str, dict[str, Any]] = {
    "a reference": {"$ref": "#/$defs/Arguments"},
    "allOf": {"allOf": [{"$ref": "#/$defs/Arguments"}, {"properties": {"other": {}}}]},
    "anyOf": {"anyOf": [{"properties": {"other": {}}}, {"$ref": "#/$defs/Arguments"}]},
    "additionalProperties": {"properties": {"other": {}}, "additionalProperties": INTEGER},
    "patternProperties": {"patternProperties": {"^v": INTEGER}},
    "a cycle": {"allOf": [{"$ref": "#"}, {"$ref": "#/$defs/Arguments"}]},
}


def arguments_of(parameters: Any, text: str) -> Any:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    call = f"<tool_call>\n<function=f>\n<parameter=value>\n{text}\n</parameter>\n</function>\n</tool_call>"
    ((_, arguments),) = parse(QwenParser([tool]), call).calls
    return json.loads(arguments)


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_parameter_is_read_by_its_schema_in_every_spelling(name: str) -> None:
    """F11: parameters typed by ``$ref``, ``enum``, ``const`` and ``allOf`` came as strings."""
    schema, text, value = SPELLINGS[name]
    parameters = {
        "type": "object",
        "properties": {"value": schema, "other": INTEGER, "listed": {"anyOf": [INTEGER]}},
        "$defs": DEFS,
        "definitions": {"Old": INTEGER},
    }
    found = arguments_of(parameters, text)
    assert found == {"value": value}
    assert type(found["value"]) is type(value)


@pytest.mark.parametrize("name", ROOTS)
def test_the_parameters_themselves_may_be_spelled_otherwise(name: str) -> None:
    """F11: properties were looked for at the root only."""
    parameters = {**ROOTS[name], "$defs": {"Arguments": {"properties": {"value": INTEGER}}}}
    assert arguments_of(parameters, "5") == {"value": 5}


NAMES: dict[str, Any] = {
    "relative to the root": "value.json",
    "absolute": "https://example.com/tools/value.json",
    "the root's own": "https://example.com/tools/f.json#/$defs/Value",
    "the root's own, relative": "f.json#/$defs/Value",
    "an old id": "https://example.com/old",
    "an old anchor": "#old",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_schemas_are_relative_to_the_documents(name: str) -> None:
    """F11: a reference was found only if it was equal to the id."""
    parameters = {
        "$id": "https://example.com/tools/f.json",
        "properties": {"value": {"$ref": NAMES[name]}},
        "$defs": {
            "Value": {"$id": "value.json", "type": "integer"},
            "Old": {"id": "https://example.com/old", "type": "integer"},
            "Anchor": {"id": "#old", "type": "integer"},
        },
    }
    assert arguments_of(parameters, "5") == {"value": 5}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("int32", "5", 5),
        ("long", "5", 5),
        ("unsigned int", "5", 5),
        ("INTEGER", "5", 5),
        ("decimal", "1.5", 1.5),
        ("list[str]", '["a"]', ["a"]),
        ("string[]", '["a"]', ["a"]),
        ("Array<string>", '["a"]', ["a"]),
        ("tuple", "[1]", [1]),
        ("dict[str, int]", '{"a": 1}', {"a": 1}),
        ("map", '{"a": 1}', {"a": 1}),
        ("Boolean", "True", True),
        ("varchar(10)", "5", "5"),
        ("date", "5", "5"),
        ("interval", "5", "5"),
    ],
)
def test_types_may_be_named_as_other_languages_name_them(name: str, text: str, value: Any) -> None:
    """F11: schemas made from signatures contain type names of their language."""
    assert arguments_of({"type": "dict", "properties": {"value": {"type": name}}}, text) == {"value": value}


def test_many_references_cost_no_more_than_they_are_long() -> None:
    """F11: each schema is read once; reading it again at each reference would take 2^60 steps."""
    defs: dict[str, Any] = {
        f"d{number}": {"allOf": [{"$ref": f"#/$defs/d{number + 1}"}] * 2} for number in range(60)
    }
    parameters = {"properties": {"value": {"$ref": "#/$defs/d30"}}, "$defs": {**defs, "d60": INTEGER}}
    assert arguments_of(parameters, "5") == {"value": 5}


@pytest.mark.timeout(30)
def test_many_constants_cost_no_more_than_they_are_long() -> None:
    """H6: 28 kB of references to one list held the router's event loop for two seconds, and four times that for minutes."""
    listed = {"enum": list(range(4000))}
    several = {
        "anyOf": [{"$ref": "#/$defs/listed"}] * 20_000,
        "allOf": [listed, {"enum": list(range(30_000))}],
    }
    assert arguments_of({"properties": {"value": several}, "$defs": {"listed": listed}}, "5") == {"value": 5}


def test_constants_of_several_types_are_distinguished() -> None:
    """F11: True and 1 are two values; lists are found as well."""
    schema = {"enum": ["a", 1, [1, {"b": 2}], None]}
    for text, value in (
        ("1", 1),
        ("1.0", 1.0),
        ("true", "true"),
        ('[1,{"b":2}]', [1, {"b": 2}]),
        ("[2]", "[2]"),
    ):
        assert arguments_of({"properties": {"value": schema}}, text) == {"value": value}


def test_a_chain_of_references_without_end_is_not_followed_to_its_end() -> None:
    defs: dict[str, Any] = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(5000)}
    parameters = {"properties": {"value": {"$ref": "#/$defs/d0"}}, "$defs": {**defs, "d5000": INTEGER}}
    assert arguments_of(parameters, "5") == {"value": "5"}


VALUES = st.one_of(
    st.tuples(st.just({"type": "integer"}), st.integers(-(2**40), 2**40)),
    st.tuples(st.just({"type": "boolean"}), st.booleans()),
    st.tuples(st.just({"type": "array"}), st.lists(st.integers(0, 9), max_size=3)),
    st.tuples(st.just({"type": "object"}), st.dictionaries(st.text("ab"), st.integers(0, 9), max_size=2)),
    st.tuples(st.just({"type": "string"}), st.from_regex(r"[a-z0-9{}\[\]]{1,8}", fullmatch=True)),
)


@given(typed=VALUES, data=st.data())
def test_any_spelling_of_a_type_gives_values_of_that_type(
    typed: tuple[Any, Any], data: st.DataObject
) -> None:
    """F11: the value is correct for any nesting of the schema."""
    schema, value = typed
    if data.draw(st.booleans()):
        schema = data.draw(
            st.sampled_from([{"const": value}, {"enum": [value]}, {**schema, "enum": [value]}])
        )
    defs: dict[str, Any] = {}
    for number in range(data.draw(st.integers(0, 5))):
        match data.draw(st.sampled_from(["$ref", "allOf", "anyOf", "oneOf", "null", "description"])):
            case "$ref":
                defs[f"d{number}"] = schema
                schema = {"$ref": f"#/$defs/d{number}"}
            case "null":
                schema = {"anyOf": [{"type": "null"}, schema]}
            case "description":
                schema = {**schema, "description": "A value.", "title": "Value"}
            case wrapper:
                schema = {wrapper: [schema]}
    parameters = {"type": "object", "properties": {"value": schema}, "$defs": defs}
    text = value if isinstance(value, str) else json.dumps(value)
    found = arguments_of(parameters, text)
    assert found == {"value": value}
    assert type(found["value"]) is type(value)
    assert jsonschema_rs.is_valid(parameters, found)
