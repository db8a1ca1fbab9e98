"""Forced calls: the schema of the answer, and its parser."""

import json
import re
from typing import Any

import pytest

from tests.text.parsing.cutting import Parsed, assert_parses, tool
from text.parsing.call_formats import MistralParser
from text.parsing.forced import ForcedCallsParser, forced_calls_schema
from text.parsing.parser import CallBegin
from text.tools import Tool, ToolChoice

WEATHER = tool("get_weather", city={"type": "string"})
NOW = tool("now")
TREE: Tool = {
    "type": "function",
    "function": {
        "name": "tree",
        "parameters": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {"root": {"$ref": "#/$defs/Node"}, "again": {"$ref": "#"}},
            "$defs": {"Node": {"type": "array", "items": {"$ref": "#/$defs/Node"}}},
        },
    },
}


def resolved(schema: dict[str, Any], reference: str) -> Any:
    found: Any = schema
    for step in reference.removeprefix("#/").split("/"):
        found = found[step]
    return found


def test_a_named_function_asks_for_its_parameters() -> None:
    schema = forced_calls_schema([WEATHER, TREE], ToolChoice("function", "tree"), True)
    assert schema == TREE["function"]["parameters"]


@pytest.mark.parametrize("parallel", [True, False])
def test_required_asks_for_a_list_of_calls(parallel: bool) -> None:
    schema = forced_calls_schema([WEATHER, NOW], ToolChoice("required"), parallel)
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    assert schema.get("maxItems") == (None if parallel else 1)
    first, second = schema["items"]["anyOf"]
    assert first["properties"]["name"] == {"const": "get_weather"}
    assert list(first["properties"]) == first["required"] == ["name", "parameters"]
    assert first["additionalProperties"] is False
    assert resolved(schema, first["properties"]["parameters"]["$ref"]) == WEATHER["function"]["parameters"]
    assert second["properties"]["name"] == {"const": "now"}


def test_references_of_a_functions_schema_stay_valid() -> None:
    schema = forced_calls_schema([TREE], ToolChoice("required"), True)
    moved = schema["$defs"]["tree"]
    assert "$schema" not in moved
    assert resolved(schema, moved["properties"]["root"]["$ref"]) == moved["$defs"]["Node"]
    assert resolved(schema, moved["properties"]["again"]["$ref"]) == moved
    assert resolved(schema, moved["$defs"]["Node"]["items"]["$ref"]) == moved["$defs"]["Node"]
    assert TREE["function"]["parameters"]["properties"]["again"] == {"$ref": "#"}, "the tool is not changed"


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ('[{"name": "now", "parameters": {}}]', [("now", "{}")], ""),
        (' [ {"name":"f","parameters":{"a":"]"}} ]\n', [("f", '{"a":"]"}')], ""),
        (
            '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]',
            [("f", '{"a": 1}'), ("g", "{}")],
            "",
        ),
        ('[{"name": "f", "parameters": {"a": ', [("f", '{"a": ')], ""),
        ('[{"na', [], '[{"na'),
        ("Sorry.", [], "Sorry."),
        (" [1]", [], " [1]"),
    ],
)
def test_required_calls(text: str, calls: list[tuple[str, str]], content: str) -> None:
    assert_parses(ForcedCallsParser, text, Parsed(content, calls))


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ('{"city": "Paris"}', [("get_weather", '{"city": "Paris"}')], ""),
        ('\n{"a": {"b": [1, 2]}}\n', [("get_weather", '{"a": {"b": [1, 2]}}')], ""),
        ('{"city": "Par', [("get_weather", '{"city": "Par')], ""),
        ("Sorry.", [], "Sorry."),
        ("", [], ""),
    ],
)
def test_a_named_call(text: str, calls: list[tuple[str, str]], content: str) -> None:
    assert_parses(lambda: ForcedCallsParser("get_weather"), text, Parsed(content, calls))
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls if arguments.endswith("}"))


def test_forced_calls_have_the_ids_that_the_models_template_takes() -> None:
    """F10: the next turn of a Mistral model refuses ids that are not 9 letters or digits."""
    parser = ForcedCallsParser("now", MistralParser)
    begin, *_ = [*parser.push("{}"), *parser.flush()]
    assert isinstance(begin, CallBegin) and re.fullmatch("[A-Za-z0-9]{9}", begin.call_id)
