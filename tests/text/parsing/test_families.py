"""Every family's calls give the same values, whole and in pieces; what is no call is content."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.parsing.cutting import Parsed, Parser, parse, tool
from tests.text.parsing.families import FORMATS, Call, written
from text.chat import Chat
from text.parsing.answer_format import TOOL_PARSERS, AnswerFormat

STRING = {"type": "string"}
TOOLS = (
    tool("get_weather", city=STRING, days={"type": "integer"}),
    tool("now"),
    tool(
        "f",
        text=STRING,
        number={"type": "number"},
        flag={"type": "boolean"},
        items={"type": "array"},
        place={"type": "object"},
        maybe={"anyOf": [{"type": "integer"}, {"type": "null"}]},
    ),
)
PARIS: Call = ("get_weather", {"city": "Paris", "days": 3})
NOW: Call = ("now", {})
ALL: Call = (
    "f",
    {
        "text": 'Grüße,\n  "世界" 🎉 \\ it\'s {[1, 2]}: ok=1 ',
        "number": -1.5,
        "flag": True,
        "items": ["a", 1, None, {"b": [False]}],
        "place": {"x": {"y": "z, 'w'"}, "n": 2},
        "maybe": None,
    },
)


def new_parser(name: str, **options: Any) -> Parser:
    answer_format = AnswerFormat(TOOL_PARSERS[name], ("<think>", "</think>"))
    return answer_format.parser(Chat(messages=[], tools=TOOLS, **options), "")


def values(parsed: Parsed) -> list[Call]:
    return [(name, json.loads(arguments)) for name, arguments in parsed.calls]


@pytest.mark.parametrize(("name", "variant"), FORMATS)
def test_calls_come_with_the_types_that_the_schema_declares(name: str, variant: str) -> None:
    calls = [PARIS, NOW, ALL]
    text = written(name, variant, calls)
    found = parse(new_parser(name), text)
    assert (found.content.strip(), values(found)) == ("", calls)
    assert parse(new_parser(name), *text) == found


@pytest.mark.parametrize(("name", "variant"), FORMATS)
def test_text_before_and_behind_calls_is_content_without_markup(name: str, variant: str) -> None:
    text = written(name, variant, [PARIS, NOW], "Let me see: 世界 <b>.", "Done <3.")
    found = parse(new_parser(name), text)
    assert values(found) == [PARIS, NOW]
    assert "".join(found.content.split()) == "Letmesee:世界<b>.Done<3."
    assert parse(new_parser(name), *text) == found
    for cut in range(0, len(text), 3):
        assert parse(new_parser(name), text[:cut], text[cut:]) == found, f"cut at {cut}: {text[:cut]!r}"


@pytest.mark.parametrize(("name", "variant"), FORMATS)
def test_a_cut_answer_raises_nothing_and_keeps_what_it_has(name: str, variant: str) -> None:
    text = written(name, variant, [PARIS, NOW], "Look.")
    for end in range(len(text)):
        found = parse(new_parser(name), text[:end])
        names = [called for called, _ in found.calls]
        assert names == ["get_weather", "now"][: len(names)]
        if len(names) == 2:
            assert json.loads(found.calls[0][1]) == PARIS[1]
        if name != "harmony":
            assert found.content.startswith("Look."[: len(found.content)])
            assert names or text[:end].split() == found.content.split()


@pytest.mark.parametrize(("name", "variant"), FORMATS)
def test_one_call_if_clients_want_no_more(name: str, variant: str) -> None:
    text = written(name, variant, [PARIS, NOW])
    assert values(parse(new_parser(name, parallel_tool_calls=False), text)) == [PARIS]


@pytest.mark.parametrize("name", sorted({name for name, _ in FORMATS} - {"harmony"}))
def test_without_tools_calls_are_text(name: str) -> None:
    variant = next(variant for one, variant in FORMATS if one == name)
    text = written(name, variant, [PARIS])
    assert parse(AnswerFormat(TOOL_PARSERS[name]).parser(Chat(messages=[]), ""), text) == Parsed(text)


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<"), max_size=12)
NUMBERS = st.integers(-(2**40), 2**40)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXT),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["a", "b_1", "C"]), inner, max_size=3)
    ),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXT,
        "number": NUMBERS,
        "flag": st.booleans(),
        "items": st.lists(JSON, max_size=3),
        "place": st.dictionaries(st.sampled_from(["a", "b_1"]), JSON, max_size=2),
        "maybe": st.one_of(st.none(), NUMBERS),
    },
)


@pytest.mark.parametrize(("name", "variant"), FORMATS)
@settings(max_examples=15)
@given(st.lists(ARGUMENTS, min_size=1, max_size=3), st.data())
def test_values_survive_any_cuts(
    name: str, variant: str, arguments: list[dict[str, Any]], data: st.DataObject
) -> None:
    calls: list[Call] = [("f", one) for one in arguments]
    text = written(name, variant, calls, "a 世", "b")
    marks = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *marks], [*marks, len(text)], strict=True)]
    found = parse(new_parser(name), *pieces)
    assert values(found) == calls
    assert "".join(found.content.split()) == "a世b"
    assert parse(new_parser(name), *text) == found


def test_a_word_that_marks_calls_may_stand_in_a_text() -> None:
    text = "Use functools.partial, or functools [1], or\n```python\nimport functools\n```"
    assert parse(new_parser("phi4"), *text) == Parsed(text)
