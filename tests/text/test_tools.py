"""Checks of a request's tools, tool choice and calls."""

import json
from typing import Any

import pytest

from contract.errors import InvalidRequestError, UnsupportedFieldError
from text.tools import ToolChoice, parse_tool_choice, parse_tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def function(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_a_tool_is_what_the_client_sent() -> None:
    """F1: keys are neither added, dropped nor reordered."""
    raw = {
        "function": {"strict": True, "parameters": SCHEMA, "description": None, "name": "f"},
        "type": "function",
        "x": 1,
    }
    (tool,) = parse_tools([raw])
    assert json.dumps(tool) == json.dumps(raw)


def test_a_flat_tool_keeps_the_order_of_its_keys() -> None:
    """F1: a tool of Responses is moved into a function, and nothing else."""
    raw = {"description": "d", "type": "function", "name": "now", "strict": None}
    (tool,) = parse_tools([raw], is_flat=True)
    wanted = {"type": "function", "function": {"description": "d", "name": "now", "strict": None}}
    assert json.dumps(tool) == json.dumps(wanted)


@pytest.mark.parametrize("raw", [None, []])
def test_no_tools(raw: Any) -> None:
    assert parse_tools(raw) == ()


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ({}, "tools"),
        ("f", "tools"),
        ([7], "tools[0]"),
        ([function(), {"function": {"name": "g"}}], "tools[1].type"),
        ([{"type": "custom", "custom": {"name": "g"}}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": "f"}], "tools[0].function"),
        ([function(), function(), function(None)], "tools[2].function.name"),
        ([function(7)], "tools[0].function.name"),
        ([function("")], "tools[0].function.name"),
        ([function("a b")], "tools[0].function.name"),
        ([function("é")], "tools[0].function.name"),
        ([function("x" * 129)], "tools[0].function.name"),
        ([function("f\n")], "tools[0].function.name"),
        ([function(description=7)], "tools[0].function.description"),
        ([function(parameters="{}")], "tools[0].function.parameters"),
        ([function(parameters=[])], "tools[0].function.parameters"),
    ],
)
def test_a_bad_tool_is_named_by_its_index(raw: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_tools(raw)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("raw", "tools", "choice"),
    [
        (None, [], ToolChoice("none")),
        (None, [function()], ToolChoice("auto")),
        ("auto", [], ToolChoice("auto")),
        ("none", [function()], ToolChoice("none")),
        ("required", [function()], ToolChoice("required")),
        (named("f"), [function("e"), function("f")], ToolChoice("function", "f")),
    ],
)
def test_choices(raw: Any, tools: list[dict[str, Any]], choice: ToolChoice) -> None:
    found = parse_tool_choice(raw, tools)
    assert found == choice
    assert found.is_forced is (choice.mode in ("required", "function"))


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (7, "tool_choice"),
        ([], "tool_choice"),
        ("f", "tool_choice"),
        ({}, "tool_choice.type"),
        ({"type": "allowed_tools"}, "tool_choice.type"),
        ({"type": "function"}, "tool_choice.function"),
        ({"type": "function", "function": {}}, "tool_choice.function.name"),
        (named("g"), "tool_choice.function.name"),
        (named(["f"]), "tool_choice.function.name"),
    ],
)
def test_a_bad_choice_is_named(raw: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_tool_choice(raw, [function("f")])
    assert caught.value.param == param
    assert param in caught.value.message


def test_an_unsupported_kind_of_choice_is_named() -> None:
    with pytest.raises(UnsupportedFieldError):
        parse_tool_choice({"type": "allowed_tools"}, [function("f")])


@pytest.mark.parametrize("raw", ["required", named("f")])
def test_no_call_can_be_asked_for_without_tools(raw: Any) -> None:
    with pytest.raises(InvalidRequestError, match="there are no tools") as caught:
        parse_tool_choice(raw, [])
    assert caught.value.param == "tool_choice"
