"""The parsers of an answer, chosen by the settings, the template's text, and the prompt's end."""

from typing import Any

import pytest

from tests.text.parsing.cutting import Parsed, Parser, assert_parses, parse, tool
from text.chat import Chat
from text.parsing.answer_format import TOOL_PARSERS, AnswerFormat, ParserChoice
from text.parsing.call_formats import HermesParser, Llama3Parser, MistralParser, QwenParser
from text.tools import ToolChoice

TOOLS = (tool("f"), tool("g"))
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
QWEN = (
    r"""{{- "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>" }}"""
)


@pytest.mark.parametrize(
    ("template", "parser", "tags"),
    [
        ("{{ messages[0].content }}", None, None),
        (QWEN, HermesParser, None),
        (QWEN + "{{ content.split('</think>')[-1] }}<think>", HermesParser, ("<think>", "</think>")),
        ("<tool_call>\n<function=x>\n<parameter=y>\nz", QwenParser, None),
        ("<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>{{ arguments }}", None, None),
        ("{{- '<|python_tag|>' }}", Llama3Parser, None),
        (
            """'Respond in the format {"name": function name, "parameters": dictionary ...}'""",
            Llama3Parser,
            None,
        ),
        ("{{- '[TOOL_CALLS] [' }}", MistralParser, None),
        ("only </think>", None, None),
    ],
)
def test_auto_chooses_by_the_template(
    template: str, parser: type | None, tags: tuple[str, str] | None
) -> None:
    assert AnswerFormat.chosen(ParserChoice(), template) == AnswerFormat(parser, tags)


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_a_parser_by_its_name(name: str) -> None:
    chosen = AnswerFormat.chosen(ParserChoice(tool_parser=name), QWEN)  # type: ignore[arg-type]
    assert chosen.tool_parser is TOOL_PARSERS[name]


def test_none_and_think_override_the_template() -> None:
    none = ParserChoice(tool_parser="none", reasoning_parser="none")
    assert AnswerFormat.chosen(none, QWEN + "<think></think>") == AnswerFormat()
    think = ParserChoice(reasoning_parser="think", reasoning_tags=("[THINK]", "[/THINK]"))
    assert AnswerFormat.chosen(think, "").reasoning_tags == ("[THINK]", "[/THINK]")


def both(prompt_end: str = "<|assistant|>", **options: Any) -> Parser:
    answer_format = AnswerFormat(HermesParser, ("<think>", "</think>"))
    return answer_format.parser(Chat(messages=[], tools=TOOLS, **options), prompt_end)


def test_calls_behind_reasoning() -> None:
    text = f"<think>\nI call <tool_call>.\n</think>\n\nWait.\n{CALL}\n{CALL}"
    assert_parses(both, text, Parsed("Wait.", [("f", "{}")] * 2, "I call <tool_call>."))


@pytest.mark.parametrize("end", ["<think>", "<|assistant|>\n<think>\n"])
def test_the_prompts_end_opens_the_reasoning(end: str) -> None:
    assert_parses(lambda: both(end), "Hm.</think>Yes.", Parsed("Yes.", reasoning="Hm."))
    assert parse(both("<think>\n\n</think>\n\n"), "Yes.") == Parsed("Yes.")


def test_without_parallel_calls_the_first_one_counts() -> None:
    assert_parses(lambda: both(parallel_tool_calls=False), f"a {CALL} {CALL} b", Parsed("a b", [("f", "{}")]))


def test_without_tools_calls_are_text() -> None:
    plain = AnswerFormat(HermesParser).parser(Chat(messages=[]), "")
    assert parse(plain, CALL) == Parsed(CALL)
    assert (plain.is_reasoning, plain.tags) == (False, ())


def test_forced_calls_are_read_from_the_answers_first_character_on() -> None:
    """A grammar excludes reasoning, even if the prompt has opened it."""
    named = both("<think>", tool_choice=ToolChoice("function", "g"))
    assert parse(named, '{"a": 1}') == Parsed(calls=[("g", '{"a": 1}')])
    required = both("<think>", tool_choice=ToolChoice("required"))
    assert parse(required, '[{"name": "g", "parameters": {}}]') == Parsed(calls=[("g", "{}")])
