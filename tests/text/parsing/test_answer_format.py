"""The parsers of an answer, chosen by the settings, the template's text, and the prompt's end."""

from typing import Any

import pytest

from tests.text.parsing.cutting import Parsed, Parser, assert_parses, parse, tool
from text.chat import Chat
from text.parsing.answer_format import TOOL_PARSERS, AnswerFormat, ParserChoice
from text.parsing.call_formats import (
    ErnieParser,
    GraniteParser,
    HermesParser,
    HunyuanParser,
    Llama3Parser,
    MistralParser,
    NemotronParser,
    PhiParser,
)
from text.parsing.harmony import HarmonyParser
from text.parsing.pythonic import GemmaParser, PythonicParser
from text.parsing.tagged import (
    DeepseekParser,
    DsmlParser,
    GlmParser,
    Hy3Parser,
    Hy3PreviewParser,
    KimiParser,
    MinimaxParser,
    QwenParser,
    SeedParser,
)
from text.tools import ToolChoice

TOOLS = (tool("f"), tool("g"))
HARMONY_TAGS = ("<|channel|>analysis<|message|>", "<|end|>")
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
        ("<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>{{ arguments }}", GlmParser, None),
        ("{{- '<|python_tag|>' }}", Llama3Parser, None),
        (
            """'Respond in the format {"name": function name, "parameters": dictionary ...}'""",
            Llama3Parser,
            None,
        ),
        ("{{- '[TOOL_CALLS] [' }}", MistralParser, None),
        ("only </think>", None, None),
        (
            "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>",
            HarmonyParser,
            HARMONY_TAGS,
        ),
        ("<|tool_calls_section_begin|><think>{{ rc }}</think>", KimiParser, ("<think>", "</think>")),
        ("{%- set dsml_token = '｜DSML｜' -%}<{{ dsml_token }}function_calls>", DsmlParser, None),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type']", DeepseekParser, None),
        ("{%- set begin = '<minimax:tool_call>' -%}<parameter name=", MinimaxParser, None),
        (
            "<seed:tool_call>\n<function=f>\n<parameter=p>v</parameter> <seed:think></seed:think>",
            SeedParser,
            ("<seed:think>", "</seed:think>"),
        ),
        (
            "'<|tool_call>call:' + name + '}<tool_call|>' '<|channel>thought\n<channel|>'",
            GemmaParser,
            ("<|channel>thought", "<channel|>"),
        ),
        ("respond only with <|tool_call|> followed by a JSON list of tools used", GraniteParser, None),
        ("'<tool_call>' + name + '<tool_sep>\n<arg_key>' + k + '</arg_key>'", Hy3PreviewParser, None),
        (
            "{%- set HYTK = ':opensource' %}{%- set a = '<tool_sep{}>'.format(HYTK) %}'<think{}>' '</think{}>'",
            Hy3Parser,
            ("<think:opensource>", "</think:opensource>"),
        ),
        ("<TOOLCALL>[{{ calls }}]</TOOLCALL>", NemotronParser, None),
        ("message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>'", PhiParser, None),
        ('a JSON list formatted as functools[{"name": [function name]}, ...]', PhiParser, None),
        ("{%- set ns_token = ']<]minimax[>[' %}<tool_call>{{ arguments }}<response>", None, None),
        ('<tool_calls>[{"name": "func_name1", "arguments": {}},...]</tool_calls>', HunyuanParser, None),
        ('"<|tool_call_start|>[" + calls + "]<|tool_call_end|>"', PythonicParser, None),
        ('"List of tools: <|tool_list_start|>[" + tools', PythonicParser, None),
        ('"<|im_start|>system\n" + "List of tools: [" + tools', PythonicParser, None),
        ("<function_calls>\nget_weather(city='New York')\n</function_calls>", PythonicParser, None),
        ("Use exact format: [func_name1(param1=value1), func_name2(...)]", PythonicParser, None),
        ("think_mode=True" + QWEN + "<|im_start|>assistant\n<response>\n", ErnieParser, None),
        ("[TOOL_CALLS] [THINK]{{ thought }}[/THINK]", MistralParser, ("[THINK]", "[/THINK]")),
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


@pytest.mark.parametrize("tools", [TOOLS, ()], ids=["tools", "no tools"])
@pytest.mark.parametrize(
    ("name", "tag"), [("ernie", "response"), ("granite", "response"), ("hunyuan", "answer")]
)
def test_tags_around_the_answer_itself_are_left_out(name: str, tag: str, tools: tuple[Any, ...]) -> None:
    answer_format = AnswerFormat(TOOL_PARSERS[name], ("<think>", "</think>"))

    def new_parser() -> Parser:
        return answer_format.parser(Chat(messages=[], tools=tools), "<think>\n")

    wrapped = f"Hm.\n</think>\n\n<{tag}>\nYes, <{tag}>.\n</{tag}>\n"
    assert_parses(new_parser, wrapped, Parsed(f"Yes, <{tag}>.", reasoning="Hm."))
    assert_parses(new_parser, "Hm.</think>\n Yes.\n", Parsed("Yes.\n", reasoning="Hm."))
    assert_parses(new_parser, f"</think><{tag}>a</{tag}>b</{tag}>c", Parsed(f"ab</{tag}>c"))
    assert_parses(new_parser, f"</think>a</{tag}>", Parsed(f"a</{tag}>"))
    assert_parses(new_parser, f"</think><{tag}>cut", Parsed("cut"))


def test_a_tag_may_be_one_token_and_a_word() -> None:
    """Only the token has to be kept when special tokens are left out; the word is text."""
    gemma = AnswerFormat(GemmaParser, ("<|channel>thought", "<channel|>"))
    parser = gemma.parser(Chat(messages=[], tools=TOOLS), "<|turn>model\n")
    assert {"<|channel>", "<channel|>", "<|tool_call>", '<|"|>'} <= set(parser.tags)
    text = "<|channel>thought\nHm.<channel|><|tool_call>call:f{}<tool_call|>"
    assert parse(parser, text) == Parsed("", [("f", "{}")], "Hm.")
    empty = gemma.parser(Chat(messages=[], tools=TOOLS), "<|channel>thought\n<channel|>")
    assert parse(empty, "Yes.") == Parsed("Yes.")
