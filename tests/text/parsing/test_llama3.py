"""``{"name": …, "parameters": …}`` as the whole answer, or behind ``<|python_tag|>``: Llama 3.1 to 3.3."""

import json

import pytest

from tests.text.parsing.cutting import Parsed, assert_parses, tool
from text.parsing.call_formats import Llama3Parser
from text.parsing.parser import Content

TAG = "<|python_tag|>"
WEATHER = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
NOW = '{"name": "now", "parameters": {}}'
PARIS = ("get_weather", '{"city": "Paris"}')
NOON = ("now", "{}")


def new_parser() -> Llama3Parser:
    return Llama3Parser([tool("get_weather", city={"type": "string"}), tool("now"), tool("f")])


WHOLE = {
    "bare": (WEATHER, "", [PARIS]),
    "tagged": (TAG + WEATHER, "", [PARIS]),
    "white space around": (f"\n\n{WEATHER}\n", "", [PARIS]),
    "white space behind the tag": (f"{TAG}\n {WEATHER}", "", [PARIS]),
    "two by a semicolon": (f"{WEATHER};{NOW}", "", [PARIS, NOON]),
    "two by a semicolon and spaces": (f"{WEATHER} ; {NOW}", "", [PARIS, NOON]),
    "two by a line": (f"{WEATHER}\n{NOW}", "", [PARIS, NOON]),
    "three tagged": (f"{TAG}{WEATHER}; {NOW}; {WEATHER}", "", [PARIS, NOON, PARIS]),
    "each with its tag": (f"{TAG}{WEATHER}{TAG}{NOW}", "", [PARIS, NOON]),
    "a semicolon at the end": (f"{WEATHER};", "", [PARIS]),
    "arguments instead": (WEATHER.replace("parameters", "arguments"), "", [PARIS]),
    "with its type": ('{"type": "function", "name": "now", "parameters": {}}', "", [NOON]),
    "type behind": ('{"name": "now", "parameters": {}, "type": "function"}', "", [NOON]),
    "parameters first": ('{"parameters": {"city": "Paris"}, "name": "get_weather"}', "", [PARIS]),
    "no parameters": ('{"name": "now"}', "", [NOON]),
    "null parameters": ('{"name": "now", "parameters": null}', "", [NOON]),
    "parameters as a string": (
        '{"name": "get_weather", "parameters": "{\\"city\\": \\"Paris\\"}"}',
        "",
        [PARIS],
    ),
    "semicolons and brackets in strings": (
        '{"name": "f", "parameters": {"code": "a; b} {\\"c\\": [1]}"}}; ' + NOW,
        "",
        [("f", '{"code": "a; b} {\\"c\\": [1]}"}'), NOON],
    ),
    "nested": (
        '{"name": "f", "parameters": {"a": {"b": [{"c": 1.5}, []]}, "d": "ß 🎉"}}',
        "",
        [("f", '{"a": {"b": [{"c": 1.5}, []]}, "d": "ß 🎉"}')],
    ),
    "text before the tag": (f"Let me see.\n{TAG}{WEATHER}", "Let me see.", [PARIS]),
    "text behind": (f"{WEATHER}\nThat is all.", "That is all.", [PARIS]),
    "a tool that was not offered, tagged": (
        TAG + '{"name": "search", "parameters": {"q": "x"}}',
        "",
        [("search", '{"q": "x"}')],
    ),
}

NO_CALLS = [
    "Just text.",
    'Text, then {"name": "now", "parameters": {}}',
    '{"city": "Paris", "name": "now"}',
    '{"name": "Alice", "age": 7}',
    '{"name": "search", "parameters": {}}',
    '\n {"name": 7}',
    '{"answer": 42}\n',
    "{}",
    "{",
    '{"name": "no',
    '{"parameters": {"a": 1}}',
    '{"parameters": {"a": 1}, "name": "search"}',
    TAG,
    f'{TAG}brave_search.call(query="x")',
    "<|python_",
    "a <| b",
    "[1, 2]",
    " ",
]

BROKEN = {
    "cut in the parameters": ('{"name": "f", "parameters": {"a": [1, 2', "", [("f", '{"a": [1, 2')]),
    "cut before the second name": (f'{WEATHER}; {{"name": "n', '; {"name": "n', [PARIS]),
    "the second is none of the tools": (
        f'{WEATHER}; {{"name": "search", "parameters": {{}}}}',
        '; {"name": "search", "parameters": {}}',
        [PARIS],
    ),
    "a semicolon, then text": (f"{WEATHER}; and so on", "; and so on", [PARIS]),
    "no comma": ('{"name": "f" "parameters": {}}', '"parameters": {}}', [("f", "")]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_calls(name: str) -> None:
    text, content, calls = WHOLE[name]
    assert_parses(new_parser, text, Parsed(content, calls))
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_is_content_to_the_last_character(text: str) -> None:
    assert_parses(new_parser, text, Parsed(text))


@pytest.mark.parametrize("name", BROKEN)
def test_broken_calls(name: str) -> None:
    text, content, calls = BROKEN[name]
    assert_parses(new_parser, text, Parsed(content, calls))


def test_an_answer_in_json_is_streamed_from_its_first_other_key_on() -> None:
    parser = new_parser()
    assert parser.push('{"answ') == []
    assert parser.push('er": 4') == [Content('{"answer": 4')]
    assert parser.push("2") == [Content("2")]
