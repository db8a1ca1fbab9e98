"""Calls between tags, except those of Qwen: special cases of each family."""

import json

import pytest

from tests.text.parsing.cutting import Parsed, assert_parses, parse, tool
from text.chat import Chat
from text.parsing.answer_format import TOOL_PARSERS, AnswerFormat
from text.parsing.parser import CallBegin
from text.parsing.tagged import DsmlParser, GlmParser, KimiParser, SeedParser
from text.tools import ToolChoice

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS = [tool("f", text=STRING, number=INTEGER, either={"type": ["string", "integer"]}, any={}), tool("now")]
GLM = "<tool_call>f\n<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"

NO_CALLS = [
    ("glm", "<tool_call>"),
    ("glm", "<tool_call>f"),
    ("glm", "<tool_call>f is a function</tool_call>"),
    ("glm", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ("minimax", "<minimax:tool_call>\nHello"),
    ("minimax", '<invoke name="other">'),
    ("dsml", "<｜DSML｜function_calls>\n</｜DSML｜function_calls>"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\nno"),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_end|>"),
    ("seed_oss", "<seed:tool_call></seed:tool_call>"),
    ("hy3preview", "<tool_calls><tool_call>f</tool_call>"),
]


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_is_content_to_the_last_character(name: str, text: str) -> None:
    assert_parses(lambda: TOOL_PARSERS[name](TOOLS), text, Parsed(text))


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "\n  if a < b:\n", "\n  if a < b:\n"),
        ("text", "</tool_call>\n<arg_key>", "</tool_call>\n<arg_key>"),
        ("text", "5", "5"),
        ("number", "5", 5),
        ("number", "many", "many"),
        ("either", "5", "5"),
        ("any", '{"a": [1]}', {"a": [1]}),
    ],
)
def test_values_are_exact_and_typed_by_the_schema(key: str, written: str, value: object) -> None:
    text = GLM.format(key, written)
    found = parse(GlmParser(TOOLS), text)
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [("f", {key: value})]
    assert_parses(lambda: GlmParser(TOOLS), text, found)


@pytest.mark.parametrize(
    ("key", "flag", "written", "value"),
    [
        ("either", "false", "5", 5),
        ("either", "true", "5", "5"),
        ("any", "true", "[1]", "[1]"),
        ("any", "false", "5", 5),
        ("number", "true", "5", 5),
        ("text", "false", "5", "5"),
        ("any", "false", "no JSON", "no JSON"),
    ],
)
def test_where_the_schema_leaves_it_open_dsml_says_what_is_text(
    key: str, flag: str, written: str, value: object
) -> None:
    text = (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        f'<｜DSML｜parameter name="{key}" string="{flag}">{written}</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    )
    found = parse(DsmlParser(TOOLS), text)
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [("f", {key: value})]


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("items", "['a', 1, None]", ["a", 1, None]),
        ("items", "['a'", "['a'"),
        ("items", "['a'] b", "['a'] b"),
        ("items", "'a'", "'a'"),
        ("place", "{'x': {'y': True}}", {"x": {"y": True}}),
        ("text", "['a']", "['a']"),
        ("any", "['a']", "['a']"),
    ],
)
def test_lists_and_objects_may_be_written_as_python_writes_them(
    key: str, written: str, value: object
) -> None:
    tools = [tool("f", text=STRING, items={"type": "array"}, place={"type": "object"}, any={})]
    text = f"<seed:tool_call>\n<function=f>\n<parameter={key}>{written}</parameter>\n</function>\n</seed:tool_call>"
    ((_, arguments),) = parse(SeedParser(tools), text).calls
    assert json.loads(arguments) == {key: value}


BROKEN: dict[str, tuple[str, str, Parsed]] = {
    "cut in a text": ("glm", GLM.format("text", "ab")[:-25], Parsed("", [("f", '{"text": "ab')])),
    "no outer tag": (
        "minimax",
        '<invoke name="f"><parameter name="text">a</parameter></invoke></minimax:tool_call>',
        Parsed("", [("f", '{"text": "a"}')]),
    ),
    "an object instead of tags": (
        "dsml",
        '<｜DSML｜tool_calls><｜DSML｜invoke name="f">\n{"text": "a"}\n</｜DSML｜invoke></｜DSML｜tool_calls>',
        Parsed("", [("f", '{"text": "a"}')]),
    ),
    "no end of the section": ("kimi", KIMI.format("functions.f:0") + " b", Parsed("b", [("f", "{}")])),
    "text in the section": (
        "kimi",
        KIMI.format("functions.f:0") + "\nb<|tool_calls_section_end|>",
        Parsed("b<|tool_calls_section_end|>", [("f", "{}")]),
    ),
    "the second is no call": (
        "kimi",
        KIMI.format("functions.f:0") + "<|tool_call_begin|>?",
        Parsed("<|tool_call_begin|>?", [("f", "{}")]),
    ),
    "cut in an object": (
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"text": "a',
        Parsed("", [("f", '{"text": "a')]),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_calls(name: str) -> None:
    parser, text, expected = BROKEN[name]
    assert_parses(lambda: TOOL_PARSERS[parser](TOOLS), text, expected)


def ids(text: str) -> list[str]:
    return [piece.call_id for piece in KimiParser(TOOLS).push(text) if isinstance(piece, CallBegin)]


def test_kimis_ids_are_those_that_its_template_shows() -> None:
    assert ids(KIMI.format("functions.f:0") + KIMI.format("functions.now:1")) == [
        "functions.f:0",
        "functions.now:1",
    ]
    first, second = ids(KIMI.format("functions.f:0") + KIMI.format("functions.f:0"))
    assert first == "functions.f:0" != second
    calls = [{"function": {"name": "f", "arguments": "{}"}}] * 2
    chat = Chat(
        messages=[{"role": "assistant", "tool_calls": calls}],
        tools=tuple(TOOLS),
        tool_choice=ToolChoice("function", "now"),
    )
    begin, *_ = AnswerFormat(KimiParser).parser(chat, "").push("{}")
    assert isinstance(begin, CallBegin) and begin.call_id == "functions.now:2"


def test_names_without_a_namespace_are_names() -> None:
    assert parse(KimiParser(TOOLS), KIMI.format("now:0")).calls == [("now", "{}")]
    assert parse(KimiParser(TOOLS), KIMI.format("now")).calls == [("now", "{}")]
