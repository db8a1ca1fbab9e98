"""For any text of a model no parser raises, plain text is not changed, and the cuts make no difference."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.parsing.cutting import Parsed, Parser, parse, tool
from text.chat import Chat
from text.parsing.answer_format import TOOL_PARSERS, AnswerFormat
from text.parsing.forced import ForcedCallsParser

TOOLS = (tool("f", a={"type": "string"}, b={"type": "integer"}),)
MARKUP = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "f",
        ">",
        "</function>",
        "<parameter=",
        "a",
        "b",
        "</parameter>",
    ),
    *(
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "<think>",
        "</think>",
        ";",
        ",",
        ":",
        " ",
        "\n",
    ),
    *(
        '{"name": "f", "arguments": {',
        '"parameters"',
        '"arguments"',
        '"name"',
        '"f"',
        "null",
        "1",
        '"\\u00e9"',
    ),
    *("{", "}", "[", "]", '"', "\\", "x", "é", "🎉", "\x00", "<", "</"),
]
LITERALS = [
    "(",
    ")",
    "=",
    "'",
    "call:",
    "f(a=",
    "f{b:",
    "to=functions.f",
    "json",
    "analysis",
    "True",
    "```json",
    "\\u00e9",
]
PLAIN = st.text(alphabet=st.characters(exclude_characters='<[{"', exclude_categories=["Cs"]), max_size=60)


def new_parser(name: str) -> Parser:
    if name in TOOL_PARSERS:
        answer_format = AnswerFormat(TOOL_PARSERS[name], ("<think>", "</think>"))
        return answer_format.parser(Chat(messages=[], tools=TOOLS), "")
    return ForcedCallsParser("f" if name == "named" else None)


PARSERS = [*TOOL_PARSERS, "required", "named"]


def texts(name: str) -> st.SearchStrategy[str]:
    """Texts of the words of a format, and of others."""
    parser = TOOL_PARSERS.get(name)
    own = [*parser.tags, *getattr(parser, "quotes", ()), *LITERALS] if parser else []
    if layout := getattr(parser, "layout", None):
        own += [word for word in vars(layout).values() if isinstance(word, str) and word]
    words = st.one_of(st.sampled_from([*own, "f"]), st.sampled_from(MARKUP))
    return st.lists(words, max_size=25).map("".join)


def has_envelope(name: str, text: str) -> bool:
    """True if the text has markup of an answer that is no call."""
    parser = TOOL_PARSERS.get(name)
    tags = ("<think>", *(parser.tags if parser and parser.is_envelope else ()))
    return any(tag in text for tag in tags)


@pytest.mark.parametrize("name", PARSERS)
@given(st.data(), st.lists(st.integers(0, 100), max_size=8))
def test_the_result_does_not_depend_on_the_cuts(name: str, data: st.DataObject, cuts: list[int]) -> None:
    text = data.draw(texts(name))
    marks = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(marks)]
    whole = parse(new_parser(name), text)
    assert parse(new_parser(name), *pieces) == whole == parse(new_parser(name), *text)
    if not whole.calls and not has_envelope(name, text):
        assert whole == Parsed(text)


@pytest.mark.parametrize("name", PARSERS)
@given(PLAIN)
def test_plain_text_is_not_changed(name: str, text: str) -> None:
    assert parse(new_parser(name), *text) == Parsed(text)
