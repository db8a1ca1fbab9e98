"""Whatever a model writes: no parser raises, plain text is never changed, the cuts make no difference."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.parsing.cutting import Parsed, Parser, parse, tool
from text.parsing.answer_format import AnswerFormat
from text.parsing.forced import ForcedCallsParser
from text.parsing.hermes import HermesParser
from text.parsing.llama3 import Llama3Parser
from text.parsing.mistral import MistralParser
from text.parsing.qwen import QwenParser

TOOLS = [tool("f", a={"type": "string"}, b={"type": "integer"})]
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
TEXTS = st.lists(st.sampled_from(MARKUP), max_size=25).map("".join)
PLAIN = st.text(alphabet=st.characters(exclude_characters='<[{"', exclude_categories=["Cs"]), max_size=60)


def new_parser(name: str) -> Parser:
    tags = ("<think>", "</think>")
    match name:
        case "hermes":
            return AnswerFormat(HermesParser, tags).parser("", TOOLS, parallel=True)
        case "llama3":
            return AnswerFormat(Llama3Parser, tags).parser("", TOOLS, parallel=True)
        case "mistral":
            return AnswerFormat(MistralParser, tags).parser("", TOOLS, parallel=True)
        case "qwen":
            return AnswerFormat(QwenParser, tags).parser("", TOOLS, parallel=True)
        case "required":
            return ForcedCallsParser()
        case _:
            return ForcedCallsParser("f")


PARSERS = ["hermes", "llama3", "mistral", "qwen", "required", "named"]


@pytest.mark.parametrize("name", PARSERS)
@given(TEXTS, st.lists(st.integers(0, 100), max_size=8))
def test_the_result_does_not_depend_on_the_cuts(name: str, text: str, cuts: list[int]) -> None:
    marks = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    texts = [text[start:end] for start, end in pairwise(marks)]
    whole = parse(new_parser(name), text)
    assert parse(new_parser(name), *texts) == whole == parse(new_parser(name), *text)
    if not whole.calls and "<think>" not in text:
        assert whole == Parsed(text)


@pytest.mark.parametrize("name", PARSERS)
@given(PLAIN)
def test_plain_text_is_not_changed(name: str, text: str) -> None:
    assert parse(new_parser(name), *text) == Parsed(text)
