"""Calls with named literals: LFM2, OLMo 3, Llama 4, Gemma 4."""

import json
from typing import Any

import pytest

from tests.text.parsing.cutting import Parsed, assert_parses, parse, tool
from text.parsing.parser import CallArguments, CallBegin
from text.parsing.pythonic import GemmaParser, PythonicParser

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS = [tool("f", text=STRING, number=INTEGER, items={"type": "array"}, any={}), tool("now")]
OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"

VALUES: dict[str, tuple[str, dict[str, Any]]] = {
    "escapes": (r"""text='a\n\'b\' \\ \x41\u00e9\U0001f389 \d'""", {"text": "a\n'b' \\ Aé🎉 \\d"}),
    "a surrogate pair": (r'text="\ud83c\udf89 \ud83c"', {"text": "🎉 �"}),
    "quotes in quotes": ("""text='it's "so"', number=1""", {"text": 'it\'s "so"', "number": 1}),
    "three quotes": ('text="""a "b"\n""c"""', {"text": 'a "b"\n""c'}),
    "an empty string": ("text='', number=0", {"text": "", "number": 0}),
    "a bare word": ("text=Paris, any=New York", {"text": "Paris", "any": "New York"}),
    "a number where text is declared": ("text=07", {"text": "07"}),
    "text where a number is declared": ("number='3'", {"number": 3}),
    "no number where one is declared": ("number='many'", {"number": "many"}),
    "numbers of Python": ("any=[1_000, .5, 5., 007, -2, 1e3]", {"any": [1000, 0.5, 5.0, 7, -2, 1000.0]}),
    "words of both languages": (
        "any=[True, true, False, false, None, null]",
        {"any": [True, True, False, False, None, None]},
    ),
    "a number without a schema": ("any=3", {"any": 3}),
    "a tuple, a trailing comma": ("items=(1, 'a',)", {"items": [1, "a"]}),
    "nested": ("any={'a': [{'b': {}}, []], c: 'd'}", {"any": {"a": [{"b": {}}, []], "c": "d"}}),
    "white space": ("\n text = 'a' ,\n number = 1 ,\n", {"text": "a", "number": 1}),
    "nothing where a value is": ("number=, text='a'", {"number": None, "text": "a"}),
    "a key that is not declared": ("more='x'", {"more": "x"}),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_of_programs_become_json(name: str) -> None:
    text, expected = VALUES[name]
    call = f"{OPEN}[f({text})]{CLOSE}"
    found = parse(PythonicParser(TOOLS), call)
    assert found.content == ""
    assert [(called, json.loads(arguments)) for called, arguments in found.calls] == [("f", expected)]
    assert_parses(lambda: PythonicParser(TOOLS), call, found)


CALLS: dict[str, tuple[str, Parsed]] = {
    "bare, as the whole answer": (
        "[f(text='a'), now()]",
        Parsed("", [("f", '{"text": "a"}'), ("now", "{}")]),
    ),
    "bare, white space around": ("\n[now()]\n", Parsed("", [("now", "{}")])),
    "bare, then text": ("[now()] Done.", Parsed("Done.", [("now", "{}")])),
    "bare, in JSON": ('{"name": "now", "parameters": {}}', Parsed("", [("now", "{}")])),
    "tagged, in JSON": (
        'a <|python_start|>{"name": "x", "parameters": {}}<|python_end|>',
        Parsed("a", [("x", "{}")]),
    ),
    "no brackets": (f"{OPEN}now(){CLOSE}", Parsed("", [("now", "{}")])),
    "no end": (f"{OPEN}[now()]", Parsed("", [("now", "{}")])),
    "a function that was not offered": (f"{OPEN}[g.h(a=1)]{CLOSE}", Parsed("", [("g.h", '{"a": 1}')])),
    "cut in a string": (f"{OPEN}[f(text='a ", Parsed("", [("f", '{"text": "a ')])),
    "cut in a word": (f"{OPEN}[f(number=12", Parsed("", [("f", '{"number": 12')])),
    "cut in a list": (f"{OPEN}[f(items=[1, 2", Parsed("", [("f", '{"items": [1, 2')])),
    "cut in a key": (f"{OPEN}[f(number=1, te", Parsed("", [("f", '{"number": 1, te')])),
    "an expression": (
        f"{OPEN}[f(number=1 + g(2))]{CLOSE}",
        Parsed(f"(2))]{CLOSE}", [("f", '{"number": "1 + g"}')]),
    ),
    "the second is no call": (f"{OPEN}[now(), 7]{CLOSE}", Parsed(f", 7]{CLOSE}", [("now", "{}")])),
}
NO_CALLS = [
    "Text [now()]",
    "[1, 2]",
    "[]",
    "[other(a=1)]",
    "[now",
    "[f('a')]",
    '[{"name": "now", "arguments": {}}]',
    OPEN,
    f"{OPEN}[f(",
    f"{OPEN}print('a'){CLOSE}",
    "<function_calls>\nNone\n</function_calls>",
    " now()",
]


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    text, expected = CALLS[name]
    assert_parses(lambda: PythonicParser(TOOLS), text, expected)


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_is_content_to_the_last_character(text: str) -> None:
    assert_parses(lambda: PythonicParser(TOOLS), text, Parsed(text))


@pytest.mark.parametrize("text", [f"{OPEN}[f(any={'[' * 100}{']' * 100})]", f"{OPEN}[f(any={'9' * 5000})]x"])
def test_depth_and_length_of_values_are_bounded(text: str) -> None:
    assert [name for name, _ in parse(PythonicParser(TOOLS), text).calls] == ["f"]


def test_a_string_is_streamed_as_it_comes() -> None:
    parser = PythonicParser(TOOLS)
    begin, opening = parser.push(f"{OPEN}[f(text='x")
    assert isinstance(begin, CallBegin)
    assert opening == CallArguments(0, '{"text": "x')
    assert parser.push('one "') == [CallArguments(0, 'one \\"')]
    assert parser.push("two'") == [CallArguments(0, "two")]
    assert parser.push(", number=5") == [CallArguments(0, '", "number": ')]
    assert parser.push(")]") == [CallArguments(0, "5}")]


def gemma(arguments: str) -> str:
    return f"<|tool_call>call:f{{{arguments}}}<tool_call|>"


GEMMA: dict[str, tuple[str, Parsed]] = {
    "quotes, backslashes and braces are text": (
        gemma('text:<|"|>a "b" \\n {c}, d:1<|"|>'),
        Parsed("", [("f", '{"text": "a \\"b\\" \\\\n {c}, d:1"}')]),
    ),
    "keys in quotes": (
        gemma('any:{<|"|>a b<|"|>:<|"|>c<|"|>}'),
        Parsed("", [("f", '{"any": {"a b": "c"}}')]),
    ),
    "JSON's quotes": (gemma('text:"a"'), Parsed("", [("f", '{"text": "a"}')])),
    "bare text": (gemma("text:New York,number:3"), Parsed("", [("f", '{"text": "New York", "number": 3}')])),
    "text around": (f"a {gemma('number:1')} b", Parsed("a b", [("f", '{"number": 1}')])),
    "no end": ("<|tool_call>call:now{}", Parsed("", [("now", "{}")])),
    "cut in a text": ('<|tool_call>call:f{text:<|"|>a<|', Parsed("", [("f", '{"text": "a<|')])),
    "no call": ("<|tool_call>call:f", Parsed("<|tool_call>call:f")),
    "no arguments of a call": ("<|tool_call>call:f{?}", Parsed("<|tool_call>call:f{?}")),
}


@pytest.mark.parametrize("name", GEMMA)
def test_gemmas_calls(name: str) -> None:
    text, expected = GEMMA[name]
    assert_parses(lambda: GemmaParser(TOOLS), text, expected)
