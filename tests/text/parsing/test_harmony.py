"""Harmony: the channels of gpt-oss's messages."""

import pytest

from tests.text.parsing.cutting import Parsed, Parser, assert_parses, parse, tool
from text.chat import Chat
from text.parsing.answer_format import AnswerFormat, ParserChoice
from text.parsing.harmony import HarmonyParser
from text.parsing.parser import Reasoning

TEMPLATE = "<|start|>{{ role }}<|channel|>{{ channel }}<|message|>{{ content }}<|end|>"
TOOLS = (tool("get_weather", city={"type": "string"}), tool("now"))
START = "<|start|>assistant"
HM = "<|channel|>analysis<|message|>Hm, 世界.<|end|>"
YES = "<|channel|>final<|message|>Yes <b>.\n<|return|>"
CALL = (
    '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris 🎉"}<|call|>'
)
PARIS = ("get_weather", '{"city": "Paris 🎉"}')

ANSWERS: dict[str, tuple[str, Parsed]] = {
    "an answer": (YES, Parsed("Yes <b>.\n")),
    "reasoning": (HM + START + YES, Parsed("Yes <b>.\n", reasoning="Hm, 世界.")),
    "reasoning and a call": (HM + START + CALL, Parsed("", [PARIS], "Hm, 世界.")),
    "a preamble": (
        f"{HM}{START}<|channel|>commentary<|message|>I look.<|end|>{START}{CALL}",
        Parsed("I look.", [PARIS], "Hm, 世界."),
    ),
    "a preamble and an answer": (
        f"<|channel|>commentary<|message|>I look.<|end|>{START}{YES}",
        Parsed("I look.\nYes <b>.\n"),
    ),
    "reasoning twice": (
        f"{HM}{START}{HM}{START}{YES}",
        Parsed("Yes <b>.\n", reasoning="Hm, 世界.\nHm, 世界."),
    ),
    "two calls": (f"{CALL}{START}{CALL}", Parsed("", [PARIS, PARIS])),
    "the recipient before the channel": (
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris 🎉"}<|call|>',
        Parsed("", [PARIS]),
    ),
    "no type": ("<|channel|>commentary to=functions.now<|message|>{}<|call|>", Parsed("", [("now", "{}")])),
    "no arguments": (
        "<|channel|>commentary to=functions.now<|message|><|call|>",
        Parsed("", [("now", "{}")]),
    ),
    "a call in the reasoning's channel": (
        "<|channel|>analysis to=functions.now code<|message|>{}<|call|>",
        Parsed("", [("now", "{}")]),
    ),
    "a tool without its namespace": (
        "<|channel|>commentary to=now<|message|>{}<|call|>",
        Parsed("", [("now", "{}")]),
    ),
    "a tool that was not offered": (
        "<|channel|>commentary to=functions.other<|message|>{}<|call|>",
        Parsed("", [("other", "{}")]),
    ),
    "another recipient": (
        f"<|channel|>analysis to=python<|message|>1+1<|end|>{START}{YES}",
        Parsed("Yes <b>.\n", reasoning="1+1"),
    ),
    "no tag at a message's end": (
        HM.replace("<|end|>", "") + START + YES,
        Parsed("Yes <b>.\n", reasoning="Hm, 世界."),
    ),
    "the role again": (START + YES, Parsed("Yes <b>.\n")),
    "cut in the reasoning": ("<|channel|>analysis<|message|>Hm <", Parsed(reasoning="Hm <")),
    "cut in a call": (CALL[:-14], Parsed("", [("get_weather", '{"city": "Par')])),
    "cut in a header": (HM + "<|start|>assis", Parsed("<|start|>assis", reasoning="Hm, 世界.")),
    "no messages at all": ("Yes, assistant to=you.", Parsed("Yes, assistant to=you.")),
    "text, then a message": (f"Well. {START}{YES}", Parsed("Well. \nYes <b>.\n")),
    "a header without a message": ("<|channel|>final? Yes", Parsed("<|channel|>final? Yes")),
    "nothing": ("", Parsed()),
}


def new_parser(tools: tuple[dict[str, object], ...] = TOOLS, reasoning: str = "auto") -> Parser:
    chosen = AnswerFormat.chosen(ParserChoice(reasoning_parser=reasoning), TEMPLATE)  # type: ignore[arg-type]
    assert chosen.tool_parser is HarmonyParser
    return chosen.parser(Chat(messages=[], tools=tools), START)


@pytest.mark.parametrize("name", ANSWERS)
def test_messages_are_separated_by_their_channels(name: str) -> None:
    text, expected = ANSWERS[name]
    assert_parses(new_parser, text, expected)


def test_without_tools_the_channels_are_separated_too() -> None:
    assert parse(new_parser(()), HM + START + YES) == Parsed("Yes <b>.\n", reasoning="Hm, 世界.")
    assert parse(new_parser(()), CALL) == Parsed('{"city": "Paris 🎉"}')


def test_reasoning_that_is_not_to_be_separated_is_content() -> None:
    assert parse(new_parser(reasoning="none"), HM + START + YES) == Parsed("Hm, 世界.Yes <b>.\n")


def test_it_is_streamed_and_says_where_it_is() -> None:
    chosen = AnswerFormat.chosen(ParserChoice(), TEMPLATE).parser(Chat(messages=[], tools=TOOLS), START)
    assert (chosen.push("<|channel|>analysis<|message|>"), chosen.is_reasoning) == ([], True)
    assert (chosen.push("Hm"), chosen.is_reasoning) == ([Reasoning("Hm")], True)
    assert (chosen.push("<|end|>"), chosen.is_reasoning) == ([], False)
    assert set(chosen.tags) >= {"<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"}
