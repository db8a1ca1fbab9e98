"""``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``: Qwen3-Coder."""

import json
from typing import Any

import pytest

from tests.text.parsing.cutting import Parsed, assert_parses, parse, tool
from text.parsing.parser import CallArguments, CallBegin
from text.parsing.tagged import QwenParser

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS = [
    tool("get_weather", city=STRING, days=INTEGER),
    tool("now"),
    tool(
        "f",
        text=STRING,
        number={"type": "number"},
        flag={"type": "boolean"},
        items={"type": "array", "items": STRING},
        place={"type": "object"},
        maybe={"anyOf": [STRING, {"type": "null"}]},
        either={"type": ["integer", "null"]},
        unknown={},
        odd={"type": 5, "anyOf": "no"},
    ),
]


def new_parser() -> QwenParser:
    return QwenParser(TOOLS)


def call(name: str, *parameters: tuple[str, str]) -> str:
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


PARIS = call("get_weather", ("city", "Paris"))

WHOLE: dict[str, tuple[str, str, list[tuple[str, dict[str, Any]]]]] = {
    "one": (PARIS, "", [("get_weather", {"city": "Paris"})]),
    "two parameters": (
        call("get_weather", ("city", "New York"), ("days", "3")),
        "",
        [("get_weather", {"city": "New York", "days": 3})],
    ),
    "none": (call("now"), "", [("now", {})]),
    "none, on one line": ("<tool_call><function=now></function></tool_call>", "", [("now", {})]),
    "two": (f"{PARIS}\n{call('now')}", "", [("get_weather", {"city": "Paris"}), ("now", {})]),
    "text before": (f"I'll look.\n\n{PARIS}", "I'll look.", [("get_weather", {"city": "Paris"})]),
    "text behind": (f"{PARIS}\nDone.", "Done.", [("get_weather", {"city": "Paris"})]),
    "values on the tag's line": (
        "<tool_call><function=get_weather><parameter=city>Paris</parameter><parameter=days>3</parameter>"
        "</function></tool_call>",
        "",
        [("get_weather", {"city": "Paris", "days": 3})],
    ),
    "code with indents, quotes and empty lines": (
        call("f", ("text", '\n  if a < b:\n    print("x\\n")\n\n')),
        "",
        [("f", {"text": '\n  if a < b:\n    print("x\\n")\n\n'})],
    ),
    "other languages": (call("f", ("text", "Grüße, 世界 🎉")), "", [("f", {"text": "Grüße, 世界 🎉"})]),
    "numbers as a string": (call("f", ("text", "123")), "", [("f", {"text": "123"})]),
    "a number": (call("f", ("number", " -1.5e3 ")), "", [("f", {"number": -1500.0})]),
    "a flag": (call("f", ("flag", "true")), "", [("f", {"flag": True})]),
    "a flag as Python spells it": (call("f", ("flag", "False")), "", [("f", {"flag": False})]),
    "a list": (call("f", ("items", '["a", "<b>", "]"]')), "", [("f", {"items": ["a", "<b>", "]"]})]),
    "an object over many lines": (
        call("f", ("place", '{\n  "x": 1,\n  "y": [2]\n}')),
        "",
        [("f", {"place": {"x": 1, "y": [2]}})],
    ),
    "a string that may be null": (call("f", ("maybe", "null")), "", [("f", {"maybe": None})]),
    "a string that may be null and is not": (call("f", ("maybe", "7")), "", [("f", {"maybe": "7"})]),
    "one of two types": (call("f", ("either", "None")), "", [("f", {"either": None})]),
    "no schema: objects and lists are JSON": (call("f", ("unknown", "[1]")), "", [("f", {"unknown": [1]})]),
    "no schema: all else is text": (call("f", ("odd", "1")), "", [("f", {"odd": "1"})]),
    "no number where one should be": (call("f", ("number", "many")), "", [("f", {"number": "many"})]),
    "a function that was not offered": (call("other", ("a", "x")), "", [("other", {"a": "x"})]),
    "an empty string": (
        "<tool_call><function=f><parameter=text></parameter></function></tool_call>",
        "",
        [("f", {"text": ""})],
    ),
    "no outer tag": (
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "",
        [("get_weather", {"city": "Paris"})],
    ),
    "parameters without their ends": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nDallas\n<parameter=days>\n3\n</function>\n</tool_call>",
        "",
        [("get_weather", {"city": "Dallas", "days": 3})],
    ),
    "no end of the function": (
        "<tool_call>\n<function=f>\n<parameter=text>\nx\n</parameter>\n</tool_call>",
        "",
        [("f", {"text": "x"})],
    ),
    "tags in the text": (
        call("f", ("text", "<div>\n<parameter>\n</div>")),
        "",
        [("f", {"text": "<div>\n<parameter>\n</div>"})],
    ),
}

NO_CALLS = [
    "Just text.\n",
    "<tool_call>\n",
    "<tool_call>\nHello",
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "<function=other>",
    "Write <function=x> for a function.",
    "<tool_call><function=>",
    "<tool_call><function=get weather>",
    "a\n<tool_call>\n<function=get_wea",
    "<function",
    "<parameter=city>Paris</parameter>",
    "1 < 2 <",
]

BROKEN = {
    "cut in a string": ("<tool_call><function=f><parameter=text>\nab\n", "", [("f", '{"text": "ab\\n')]),
    "cut in a number": ("<tool_call><function=f><parameter=number>12", "", [("f", '{"number": ')]),
    "cut between parameters": (
        "<tool_call><function=f><parameter=text>a</parameter>\n",
        "",
        [("f", '{"text": "a"')],
    ),
    "text in the function": (
        "<tool_call><function=now>\nhello</function></tool_call>",
        "hello</function></tool_call>",
        [("now", "{}")],
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_calls(name: str) -> None:
    text, content, calls = WHOLE[name]
    found = parse(new_parser(), text)
    assert found.content == content
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == calls
    assert_parses(new_parser, text, found)


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_is_content_to_the_last_character(text: str) -> None:
    assert_parses(new_parser, text, Parsed(text))


@pytest.mark.parametrize("name", BROKEN)
def test_broken_calls(name: str) -> None:
    text, content, calls = BROKEN[name]
    assert_parses(new_parser, text, Parsed(content, calls))


def test_a_string_is_streamed_as_it_comes() -> None:
    parser = new_parser()
    begin, opening = parser.push("<tool_call>\n<function=f>\n<parameter=text>x")
    assert isinstance(begin, CallBegin)
    assert opening == CallArguments(0, '{"text": "x')
    assert parser.push('one "two"\n') == [CallArguments(0, 'one \\"two\\"')]
    assert parser.push("three <") == [CallArguments(0, "\\nthree ")]
    assert parser.push("/parameter>\n<parameter=number>1") == [CallArguments(0, '", "number": ')]
    assert parser.push("5</parameter></function>") == [CallArguments(0, "15}")]
