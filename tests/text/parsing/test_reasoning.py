"""``<think>…</think>`` at an answer's beginning, also where the prompt has opened it."""

import pytest

from tests.text.parsing.cutting import Parsed, assert_parses
from text.parsing.answer_format import ReasoningParser
from text.parsing.parser import Content, Reasoning


def fresh() -> ReasoningParser:
    return ReasoningParser("<think>", "</think>")


def opened() -> ReasoningParser:
    return ReasoningParser("<think>", "</think>", is_reasoning=True)


ANSWERS = [
    ("<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("\n<think> a\n\nb </think> Yes.\n", "a\n\nb", "Yes.\n"),
    ("<think>\n\n</think>\n\nYes.", "", "Yes."),
    ("<think></think>Yes.", "", "Yes."),
    ("<think>a < b, <thin, </thin</think>c", "a < b, <thin, </thin", "c"),
    ("<think>never closed", "never closed", ""),
    ("<think>cut in the tag</thi", "cut in the tag</thi", ""),
    ("<think>", "", ""),
    ("<think>Hm.</think>", "Hm.", ""),
    ("<think>Hm.</think>\n\n", "Hm.", ""),
    ("<think>a</think>b <think>c</think>", "a", "b <think>c</think>"),
    ("<think>a</think></think>b", "a", "</think>b"),
    ("<think><think>a</think>b", "<think>a", "b"),
    ("<think>Überlegung 🤔</think>世界", "Überlegung 🤔", "世界"),
    ("Yes.", "", "Yes."),
    ("  Yes.  ", "", "  Yes.  "),
    ("<thin", "", "<thin"),
    ("\n<thinking>no</thinking>", "", "\n<thinking>no</thinking>"),
    ("Write <think> at the start.", "", "Write <think> at the start."),
    ("</think>Yes.", "", "</think>Yes."),
    ("", "", ""),
]

OPENED = [
    ("Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("\nHm.</think>Yes.", "Hm.", "Yes."),
    ("<think>\nHm.</think>Yes.", "Hm.", "Yes."),
    ("</think>\n\nYes.", "", "Yes."),
    ("\n\n</think>\n\nYes.", "", "Yes."),
    ("never closed\n", "never closed\n", ""),
    ("<thi", "<thi", ""),
]


@pytest.mark.parametrize(("text", "reasoning", "content"), ANSWERS)
def test_the_model_opens_it(text: str, reasoning: str, content: str) -> None:
    assert_parses(fresh, text, Parsed(content, reasoning=reasoning))


@pytest.mark.parametrize(("text", "reasoning", "content"), OPENED)
def test_the_prompt_has_opened_it(text: str, reasoning: str, content: str) -> None:
    assert_parses(opened, text, Parsed(content, reasoning=reasoning))


def test_other_tags() -> None:
    assert_parses(
        lambda: ReasoningParser("[THINK]", "[/THINK]"),
        "[THINK]a <think>[/THINK]b",
        Parsed("b", reasoning="a <think>"),
    )


def test_it_is_streamed_and_says_where_it_is() -> None:
    parser = fresh()
    assert (parser.push("<thi"), parser.is_reasoning) == ([], False)
    assert (parser.push("nk>\nA"), parser.is_reasoning) == ([Reasoning("A")], True)
    assert (parser.push(" b\n"), parser.is_reasoning) == ([Reasoning(" b")], True)
    assert (parser.push("</think>\n"), parser.is_reasoning) == ([], False)
    assert parser.push("c ") == [Content("c ")]
