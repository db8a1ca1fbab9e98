"""``<tool_call>{json}</tool_call>``: Hermes 2 Pro, Qwen 2.5, Qwen 3."""

import json

import pytest

from tests.text.parsing.cutting import Parsed, assert_parses
from text.parsing.call_formats import HermesParser
from text.parsing.parser import CallArguments, CallBegin, Content
from text.parsing.reader import MAX_SPACE

WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
PARIS = ("get_weather", '{"city": "Paris"}')

WHOLE = {
    "qwen, on lines of its own": (f"<tool_call>\n{WEATHER}\n</tool_call>", "", [PARIS]),
    "on one line": (f"<tool_call>{WEATHER}</tool_call>", "", [PARIS]),
    "behind text": (f"I'll look.\n<tool_call>\n{WEATHER}\n</tool_call>", "I'll look.", [PARIS]),
    "before text": (f"<tool_call>{WEATHER}</tool_call>\n\nPlease wait.", "Please wait.", [PARIS]),
    "two": (
        f'<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>',
        "",
        [PARIS, ("now", "{}")],
    ),
    "three without a space": (f"<tool_call>{WEATHER}</tool_call>" * 3, "", [PARIS] * 3),
    "text between": (
        f"a <tool_call>{WEATHER}</tool_call> b <tool_call>{WEATHER}</tool_call> c",
        "a b c",
        [PARIS, PARIS],
    ),
    "text between, on lines of its own": (
        f"a<tool_call>{WEATHER}</tool_call>\n\nb",
        "a\n\nb",
        [PARIS],
    ),
    "arguments first": (
        '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>',
        "",
        [PARIS],
    ),
    "nested, with brackets in strings": (
        '<tool_call>{"name": "f", "arguments": {"a": [1, {"b": "}]\\"{"}], "c": {"d": null}}}</tool_call>',
        "",
        [("f", '{"a": [1, {"b": "}]\\"{"}], "c": {"d": null}}')],
    ),
    "the closing tag in a string": (
        '<tool_call>{"name": "write", "arguments": {"text": "</tool_call>\\n<tool_call>"}}</tool_call>',
        "",
        [("write", '{"text": "</tool_call>\\n<tool_call>"}')],
    ),
    "other languages": (
        '<tool_call>{"name": "say", "arguments": {"text": "Grüße, 世界 🎉 \\ud83d\\ude00"}}</tool_call>',
        "",
        [("say", '{"text": "Grüße, 世界 🎉 \\ud83d\\ude00"}')],
    ),
    "written over many lines": (
        '<tool_call>\n{\n  "name": "f",\n  "arguments": {\n    "n": -1.5e3,\n    "ok": true\n  }\n}\n</tool_call>',
        "",
        [("f", '{\n    "n": -1.5e3,\n    "ok": true\n  }')],
    ),
    "no arguments": ('<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    "null arguments": ('<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", "{}")]),
    "arguments as a string": (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    "parameters instead": (
        '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    "more keys": (
        '<tool_call>{"type": "function", "id": 7, "name": "f", "arguments": {}, "why": ["x", 1]}</tool_call>',
        "",
        [("f", "{}")],
    ),
    "no closing tag": (f"<tool_call>\n{WEATHER}", "", [PARIS]),
    "closing tag forgotten between": (
        f"<tool_call>{WEATHER}<tool_call>{WEATHER}</tool_call>",
        "",
        [PARIS, PARIS],
    ),
    "white space before it": (f"\n\n<tool_call>{WEATHER}</tool_call>\n", "", [PARIS]),
    "escapes in the name": (
        '<tool_call>{"name": "get\\u005fit", "arguments": {}}</tool_call>',
        "",
        [("get_it", "{}")],
    ),
}

NO_CALLS = [
    "Just text.",
    "White space at the end \n ",
    " \n",
    "a < b and <tool is no tag",
    "<tool_call>",
    "<tool_call>  not json",
    'I write <tool_call> {"city": "Paris"}</tool_call> like this.',
    '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {"a": 1}}</tool_call>',
    '<tool_call>"name": "f"}</tool_call>',
    "<tool_call>{}</tool_call>",
    'before\n<tool_call>\n{"na',
    'before\n<tool_call>\n{"name": "get_wea',
    "</tool_call>",
    "<tool_call",
    "\n<tool_call>\n",
]

BROKEN = {
    "cut in the arguments": ('<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    "cut in an escape": ('<tool_call>{"name": "f", "arguments": {"a": "b\\', "", [("f", '{"a": "b\\')]),
    "cut behind the name": ('<tool_call>{"name": "f"', "", [("f", "")]),
    "goes on as no JSON": ('<tool_call>{"name": "f", oops}</tool_call>', "oops}</tool_call>", [("f", "")]),
    "text behind the object": (
        f"<tool_call>{WEATHER} and more</tool_call>",
        "and more</tool_call>",
        [PARIS],
    ),
    "no call, then a call": (
        f"<tool_call>no, rather <tool_call>{WEATHER}</tool_call>",
        "<tool_call>no, rather",
        [PARIS],
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_calls(name: str) -> None:
    text, content, calls = WHOLE[name]
    assert_parses(HermesParser, text, Parsed(content, calls))
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_is_content_to_the_last_character(text: str) -> None:
    assert_parses(HermesParser, text, Parsed(text))


@pytest.mark.parametrize("name", BROKEN)
def test_broken_calls(name: str) -> None:
    text, content, calls = BROKEN[name]
    assert_parses(HermesParser, text, Parsed(content, calls))


def test_arguments_are_streamed_as_they_come() -> None:
    parser = HermesParser()
    assert parser.push("Look:\n") == [Content("Look:")]
    assert parser.push('<tool_call>{"name": "f') == []
    (begin,) = parser.push('", "arguments":')
    assert isinstance(begin, CallBegin)
    assert (begin.index, begin.name, begin.call_id[:5]) == (0, "f", "call_")
    assert parser.push(' {"text": "one ') == [CallArguments(0, '{"text": "one ')]
    assert parser.push("two") == [CallArguments(0, "two")]
    assert parser.push('"}}</tool') == [CallArguments(0, '"}')]
    assert parser.push("_call>") == [] == parser.flush()


@pytest.mark.parametrize("num_spaces", [MAX_SPACE - 1, MAX_SPACE, MAX_SPACE + 1, 3 * MAX_SPACE])
def test_white_space_without_end_is_not_held_back(num_spaces: int) -> None:
    space = "\n" * num_spaces
    content = "a" + space[MAX_SPACE:]
    assert_parses(HermesParser, f"a{space}<tool_call>{WEATHER}</tool_call>", Parsed(content, [PARIS]))
    assert_parses(HermesParser, f"a{space}b", Parsed(f"a{space}b"))
    assert len(HermesParser().push(space)) == (num_spaces > MAX_SPACE)


def test_only_what_may_be_markup_is_held_back() -> None:
    parser = HermesParser()
    assert parser.push("a <") == [Content("a")]
    assert parser.push("b") == [Content(" <b")]
    assert parser.push(" c ") == [Content(" c")]
    assert parser.flush() == [Content(" ")]
