"""``[TOOL_CALLS][{…}, …]``, and ``[TOOL_CALLS]name[ARGS]{…}`` since 2025."""

import json

import pytest

from tests.text.parsing.cutting import Parsed, assert_parses, collected
from text.parsing.call_formats import MistralParser
from text.parsing.parser import CallBegin

TAG = "[TOOL_CALLS]"
WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
NOW = '{"name": "now", "arguments": {}}'
PARIS = ("get_weather", '{"city": "Paris"}')
NOON = ("now", "{}")

WHOLE = {
    "one": (f"{TAG}[{WEATHER}]", "", [PARIS]),
    "a space behind the tag": (f"{TAG} [{WEATHER}]", "", [PARIS]),
    "two": (f"{TAG}[{WEATHER}, {NOW}]", "", [PARIS, NOON]),
    "two without a space": (f"{TAG}[{WEATHER},{NOW}]", "", [PARIS, NOON]),
    "over many lines": (f"{TAG} [\n  {WEATHER},\n  {NOW}\n]\n", "", [PARIS, NOON]),
    "with ids": (
        f'{TAG}[{{"name": "now", "arguments": {{}}, "id": "abc123xyz"}}]',
        "",
        [NOON],
    ),
    "arguments first": (f'{TAG}[{{"arguments": {{"city": "Paris"}}, "name": "get_weather"}}]', "", [PARIS]),
    "arguments as a string": (f'{TAG}[{{"name": "now", "arguments": "{{}}"}}]', "", [NOON]),
    "a single object": (f"{TAG}{WEATHER}", "", [PARIS]),
    "text before": (f"Let me see. {TAG}[{WEATHER}]", "Let me see.", [PARIS]),
    "text behind": (f"{TAG}[{WEATHER}] Done.", "Done.", [PARIS]),
    "no closing bracket": (f"{TAG}[{WEATHER}", "", [PARIS]),
    "brackets in strings": (
        f'{TAG}[{{"name": "f", "arguments": {{"a": "]}}[TOOL_CALLS]\\"", "b": [[]]}}}}]',
        "",
        [("f", '{"a": "]}[TOOL_CALLS]\\"", "b": [[]]}')],
    ),
    "named": (f'{TAG}get_weather[ARGS]{{"city": "Paris"}}', "", [PARIS]),
    "named twice": (f'{TAG}get_weather[ARGS]{{"city": "Paris"}}{TAG}now[ARGS]{{}}', "", [PARIS, NOON]),
    "named, with an id": (f"{TAG}now[CALL_ID]abc123xyz[ARGS]{{}}", "", [NOON]),
    "named without a tag": (f'{TAG}get_weather{{"city": "Paris"}}', "", [PARIS]),
    "named, with spaces": (f'{TAG} get_weather[ARGS] {{"city": "Paris"}}\n', "", [PARIS]),
    "named behind text": (f"Yes.\n\n{TAG}now[ARGS]{{}}", "Yes.", [NOON]),
    "named, then text": (f"{TAG}now[ARGS]{{}}\nDone.", "Done.", [NOON]),
    "named, with dots and dashes": (f'{TAG}a.b-c_1[ARGS]{{"x": "ß"}}', "", [("a.b-c_1", '{"x": "ß"}')]),
    "named, over many lines": (
        f'{TAG}f[ARGS]{{\n  "a": [1,\n 2]\n}}{TAG}now[ARGS]{{}}',
        "",
        [("f", '{\n  "a": [1,\n 2]\n}'), NOON],
    ),
}

NO_CALLS = [
    "Just text.",
    "[TOOL_CALLS",
    "a [TOOL] b",
    TAG,
    f"{TAG}[",
    f"{TAG}[]",
    f"{TAG} []\n",
    f'{TAG}[{{"city": "Paris"}}]',
    f'{TAG}[{{"na',
    f"{TAG}get_weather",
    f"{TAG}get_weather and more",
    f"{TAG}get_weather[ARGS]",
    f"{TAG}get_weather[ARGS]no",
    f"{TAG}get_weather[CALL_ID]abc",
    f"{TAG}[ARGS]{{}}",
    f"text\n{TAG} ?",
    "\n",
]

BROKEN = {
    "cut in the arguments": (f'{TAG}f[ARGS]{{"a": tr', "", [("f", '{"a": tr')]),
    "cut before the second": (f"{TAG}[{WEATHER}, ", ", ", [PARIS]),
    "the second is no call": (f"{TAG}[{WEATHER}, 7] x", ", 7] x", [PARIS]),
    "text in the list": (f"{TAG}[{WEATHER} and]", " and]", [PARIS]),
    "no call, then a call": (f"{TAG}no, {TAG}now[ARGS]{{}}", f"{TAG}no,", [NOON]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_calls(name: str) -> None:
    text, content, calls = WHOLE[name]
    assert_parses(MistralParser, text, Parsed(content, calls))
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_is_content_to_the_last_character(text: str) -> None:
    assert_parses(MistralParser, text, Parsed(text))


@pytest.mark.parametrize("name", BROKEN)
def test_broken_calls(name: str) -> None:
    text, content, calls = BROKEN[name]
    assert_parses(MistralParser, text, Parsed(content, calls))


def test_ids_are_nine_letters_or_digits_as_the_templates_demand() -> None:
    pieces = MistralParser().push(f"{TAG}[{WEATHER}, {NOW}]")
    assert len(collected(pieces).calls) == 2
    for begin in pieces:
        if isinstance(begin, CallBegin):
            assert len(begin.call_id) == 9 and begin.call_id.isascii() and begin.call_id.isalnum()
