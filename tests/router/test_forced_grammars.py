"""The grammar of forced calls enforces the constraints of the parameters, and nothing else of the tools."""

import json
from typing import Any

import pytest

from contract.errors import InvalidRequestError
from contract.json_schema import plain_schema
from contract.sampling import Grammar
from router.http.bodies.body import Body
from router.http.fields.chat import chat_of, forced_calls

MESSAGES = [{"role": "user", "content": "hello"}]


def tool(name: str, parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def grammar_for(tools: list[dict[str, Any]], choice: Any = "required") -> Grammar:
    body = Body({"messages": MESSAGES, "tools": tools, "tool_choice": choice})
    grammar = forced_calls(chat_of(body), {})["grammar"]
    assert isinstance(grammar, Grammar)
    return grammar


def test_descriptions_of_tools_do_not_count() -> None:
    """F13: 60 tools with their descriptions were rejected with tool_choice "required"."""
    properties = {
        f"p{i}": {"type": "string", "description": "x" * 300, "examples": ["y"] * 20} for i in range(8)
    }
    tools = [
        tool(f"f{i}", {"type": "object", "properties": properties}, description="z" * 900) for i in range(60)
    ]
    grammar = grammar_for(tools)
    assert len(json.dumps(tools)) > 200_000 and len(grammar.text) < 2**16
    assert "xxx" not in grammar.text and plain_schema(grammar.text) == grammar.text


WIDE = {"type": "object", "properties": {"n": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}}}
UNHELD = {"type": "object", "properties": {"n": {"type": "string", "not": {"const": "a"}}}}


def test_one_of_several_tools_does_not_refuse_the_request() -> None:
    """F14: bounds of int64 are enforced; constraints of a tool that is not strict are dropped if they cannot be enforced."""
    grammar = grammar_for([tool("plain", {"type": "object"}), tool("wide", WIDE), tool("unheld", UNHELD)])
    assert "not" not in grammar.text and "minimum" in grammar.text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "unheld"}}])
def test_an_unenforceable_constraint_of_a_strict_tool_is_rejected_by_its_path(choice: Any) -> None:
    """F14: the tool and the path are named."""
    tools = [tool("plain", {"type": "object"}), tool("unheld", UNHELD, strict=True)]
    with pytest.raises(InvalidRequestError, match=r"tools\[1\].*#/properties/n/not") as found:
        grammar_for(tools, choice)
    assert found.value.param == "tools"
    assert grammar_for(tools, {"type": "function", "function": {"name": "plain"}}).kind == "json_schema"


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([tool(f"f{i}", {"title": "t" * 2**18}) for i in range(5)], "with their annotations"),
        ([tool(f"f{i}", {}) for i in range(5000)], "5000 functions; .* the limit is 4096"),
    ],
    ids=["long", "many"],
)
def test_tools_that_take_too_long_to_reduce_are_rejected_before(
    tools: list[dict[str, Any]], words: str
) -> None:
    """M2: seven tools with a megabyte each blocked the event loop for a second before they were rejected."""
    with pytest.raises(InvalidRequestError, match=words) as found:
        grammar_for(tools)
    assert found.value.param == "tools"
    assert grammar_for(tools, {"type": "function", "function": {"name": "f1"}}).kind == "json_schema"


LOOSE: dict[str, Any] = {
    "types of other languages": {
        "a": {"type": "float"},
        "b": {"type": ["str", "None"]},
        "c": {"type": "any"},
    },
    "references that lead nowhere": {
        "a": {"$ref": "#/components/schemas/A"},
        "b": {"$ref": "https://example.com/b"},
        "c": {"$ref": "#anchor"},
    },
    "bounds and divisors": {"a": {"type": "integer", "minimum": 2**70}, "b": {"multipleOf": 123_457}},
    "two unions": {"a": {"anyOf": [{"type": "string"}], "oneOf": [{"minLength": 1}, {}]}},
    "patterns": {"a": {"type": "object", "patternProperties": {"(?!a)": {}}, "additionalProperties": False}},
    "other forms": {
        "a": {"type": "object", "properties": [], "required": "a", "additionalProperties": "no"},
        "b": {"type": "string", "minLength": "1", "maxLength": -1, "pattern": 7, "enum": []},
        "c": {"type": "array", "items": "string", "minItems": 1.5},
        "d": "string",
    },
}


@pytest.mark.parametrize("name", LOOSE)
def test_a_loose_schema_of_one_tool_does_not_refuse_the_request(name: str) -> None:
    """F14: unusual schemas that people and converters write do not fail the request."""
    parameters = {"type": "dict", "properties": LOOSE[name]}
    grammar = grammar_for([tool("plain", {"type": "object"}), tool("loose", parameters)])
    properties = json.loads(grammar.text)["$defs"]["loose"]["properties"]
    assert properties.keys() >= LOOSE[name].keys() - {"d"}
    assert "(?!" not in grammar.text and "minLength" not in properties.get("b", {})


def test_types_of_other_languages_are_understood() -> None:
    """F11: the parser of calls reads these types too."""
    parameters = {"type": "dict", "properties": LOOSE["types of other languages"]}
    grammar = grammar_for([tool("f", parameters)])
    found = json.loads(grammar.text)["$defs"]["f"]
    assert found["type"] == "object"
    assert found["properties"] == {"a": {"type": "number"}, "b": {"type": ["string", "null"]}, "c": {}}
    with pytest.raises(
        InvalidRequestError, match="#/properties/a/type: 'float' is not a type of JSON Schema"
    ):
        grammar_for([tool("f", parameters, strict=True)])
