"""The probe's results for templates of every form, and the proof that no message is lost."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from contract.errors import InvalidRequestError
from tests.text import template_sources as sources
from text.chat import Chat, parse_messages
from text.templates.chat_template import ChatTemplate
from text.templates.probe import TemplateReport

TEMPLATES = {
    name: ChatTemplate(source, bos_token="<s>", eos_token="</s>") for name, source in sources.ALL.items()
}
REPORTS: list[tuple[str, dict[str, str]]] = [
    ("GENERIC", {"user": "text", "developer": "as system", "later system messages": "kept"}),
    ("GENERIC", {"calls": "as JSON in the text", "tools": "in the system message", "documents": "refused"}),
    ("JSON_TOOLS", {"tools": "shown", "calls": "arguments as object, content null"}),
    ("PARTS_ONLY", {"user": "parts", "assistant": "parts", "system": "parts"}),
    ("PARTS_ONLY", {"content parts": "kept for user, system, assistant"}),
    ("CONCATENATES", {"calls": "arguments as text, content null"}),
    ("NULL_CONTENT", {"calls": "arguments as text, content null", "text and calls": "two messages"}),
    ("NULL_CONTENT", {"earlier reasoning": "dropped", "reasoning alone": "empty"}),
    ("READS_THINKING", {"earlier reasoning": "as thinking, beside calls and in earlier turns"}),
    ("READS_REASONING", {"earlier reasoning": "as reasoning, beside calls and in earlier turns"}),
    ("DROPS_REASONING", {"earlier reasoning": "as reasoning_content, beside calls"}),
    ("TRAP", {"developer": "as system", "system": "text"}),
    ("KNOWS_DEVELOPER", {"developer": "text"}),
    (
        "ONE_SYSTEM",
        {"neighbouring system messages": "merged", "later system messages": "marked in a user turn"},
    ),
    ("LOSES_SYSTEMS", {"neighbouring system messages": "merged"}),
    ("NO_SYSTEM", {"system": "in the first user message", "developer": "as system"}),
    ("NO_SYSTEM", {"calls": "as JSON in the text, results from the user"}),
    ("SHORT_IDS", {"calls": "arguments as object, content null, short ids", "system": "text"}),
    ("GOES_THROUGH_ARGUMENTS", {"calls with broken arguments": "within an object"}),
    ("GOES_THROUGH_ARGUMENTS", {"calls": "arguments as object, content empty"}),
    ("TRIMS", {"user": "text", "assistant": "text"}),
    ("LAST_TWO", {"user": "text", "assistant": "refused"}),
    ("FIRST_USER", {"user": "text", "assistant": "refused"}),
    ("TRUNCATES", {"user": "refused"}),
    ("UPPER", {"user": "refused", "assistant": "refused"}),
    ("IGNORES", {"user": "refused", "tools": "refused"}),
    ("NEEDS_PARAMETERS", {"tools": "shown", "tools without parameters": "with an empty schema"}),
    ("FLAT_TOOLS", {"tools": "shown, the functions alone"}),
    ("KEY_OF_SYSTEM", {"tools": "under a key of the system message", "calls": "as JSON in the text"}),
]


@pytest.mark.parametrize(("name", "wanted"), REPORTS)
def test_the_report_says_how_each_kind_of_conversation_is_shown(name: str, wanted: dict[str, str]) -> None:
    """F4: abilities are found by what a template writes."""
    found = TEMPLATES[name].report.abilities["default"]
    assert {kind: found[kind] for kind in wanted} == wanted


def test_a_template_that_shows_no_user_is_a_problem() -> None:
    problems = TEMPLATES["IGNORES"].report.problems()
    assert len(problems) == 2 and "user" in problems[0] and "'default'" in problems[0]
    assert TEMPLATES["GENERIC"].report.problems() == []
    assert "refused: documents" in TEMPLATES["GENERIC"].report.line()


def test_refused_kinds_carry_the_templates_name_where_there_are_several() -> None:
    report = TemplateReport({"default": {"user": "text"}, "rag": {"user": "refused"}})
    assert report.refused() == ["rag: user"]


WORDS = st.text(st.sampled_from("ab \n<>/|{}\"'\\é☃"), max_size=8)
TEXTS = st.builds("{}w{}x{}".format, WORDS, st.integers(0, 2**60), WORDS)
MAYBE = st.one_of(TEXTS, st.none(), st.just(""))
ARGUMENTS = st.one_of(
    TEXTS, st.builds(lambda key, value: json.dumps({key: [value]}, ensure_ascii=False), TEXTS, TEXTS)
)
CALL = st.builds(
    lambda name, arguments: {
        "id": f"call_{name}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    },
    st.builds("f{}".format, st.integers(0, 2**60)),
    ARGUMENTS,
)
PARTS = st.lists(st.builds(lambda text: {"type": "text", "text": text}, TEXTS), min_size=1, max_size=3)
MESSAGE = st.one_of(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "system", "developer", "tool", "user", "assistant"]),
        st.one_of(TEXTS, PARTS),
    ),
    st.builds(
        lambda content, calls: {"role": "assistant", "content": content, "tool_calls": calls},
        MAYBE,
        st.lists(CALL, min_size=1, max_size=2),
    ),
)


def spellings(text: str) -> set[str]:
    """Return the ways in which a template may write a text; white space does not count."""
    quoted = {json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1]}
    twice = {json.dumps(one, ensure_ascii=False)[1:-1] for one in quoted}
    return {"".join(one.split()).replace("\\n", "") for one in {text, *quoted, *twice}}


def texts_of(message: dict[str, Any]) -> list[str]:
    content = message["content"] or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    for call in message.get("tool_calls", ()):
        texts += [call["function"]["name"]]
        arguments = call["function"]["arguments"]
        try:
            ((key, (value,)),) = json.loads(arguments).items()
            texts += [key, value]
        except (ValueError, AttributeError, TypeError):
            texts.append(arguments)
    return texts


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(messages=st.lists(MESSAGE, min_size=1, max_size=6))
def test_no_message_is_ever_lost(name: str, messages: list[dict[str, Any]]) -> None:
    """F4: a conversation is either completely in the prompt, or rejected."""
    try:
        prompt = TEMPLATES[name].render(Chat(messages=parse_messages(messages)))
    except InvalidRequestError:
        return
    shown = "".join(prompt.split()).replace("\\n", "")
    for message in messages:
        for text in texts_of(message):
            assert any(one in shown for one in spellings(text)), text


SHORT = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "assistant"]),
        st.text(st.sampled_from("<usera>"), min_size=1, max_size=3),
    ),
    min_size=3,
    max_size=5,
)


@settings(max_examples=30, deadline=None)
@given(messages=SHORT)
def test_a_lost_message_is_found_though_the_markup_holds_its_text(messages: list[dict[str, Any]]) -> None:
    """F4: each text is found by marks around it, not by a search that finds it elsewhere."""
    with pytest.raises(InvalidRequestError, match="does not show"):
        TEMPLATES["LAST_TWO"].render(Chat(messages=parse_messages(messages)))


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_tools_are_under_the_key_that_the_template_reads(system: str) -> None:
    """Phi-4-mini reads the functions alone, in JSON, between marks behind the text of the system message."""
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
    messages = [{"role": "system", "content": system}] if system else []
    chat = Chat(
        messages=parse_messages([*messages, {"role": "user", "content": "1 + 1?"}]),
        tools=({"type": "function", "function": function},),
    )
    assert TEMPLATES["KEY_OF_SYSTEM"].render(chat) == (
        f"<|system|>{system}<|tool|>[{json.dumps(function)}]<|/tool|><|end|><|user|>1 + 1?<|end|><|assistant|>"
    )


WELL_FORMED: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi, ünïcode \n\n and <tags> </think>"}],
    [{"role": "system", "content": " S "}, {"role": "user", "content": "A"}],
    [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "<think>t</think>\n\nB"},
        {"role": "user", "content": "C"},
    ],
]


def transformers_render(conversations: list[Any], **options: Any) -> str:
    rendered: Any = render_jinja_template(conversations, **options)
    return str(rendered[0][0])


@pytest.mark.parametrize("messages", WELL_FORMED)
@pytest.mark.parametrize(
    "name",
    [
        "GENERIC",
        "JSON_TOOLS",
        "DROPS_REASONING",
        "TRIMS",
        "ONE_SYSTEM",
        "SHORT_IDS",
        "KNOWS_DEVELOPER",
    ],
)
def test_well_formed_conversations_are_rendered_as_by_transformers(
    name: str, messages: list[dict[str, Any]]
) -> None:
    """F4: probing changes nothing about what a template takes as it is."""
    wanted = transformers_render(
        [messages],
        chat_template=sources.ALL[name],
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert TEMPLATES[name].render(Chat(messages=parse_messages(messages))) == wanted


def test_calls_tools_and_reasoning_are_rendered_as_by_transformers() -> None:
    """F1: keys, their order and the form of arguments are what transformers gives to a template."""
    arguments = {"b": [1, 2.5, None, {"z": 1, "a": "é"}], "a": "x"}
    call = {
        "id": "call_a12",
        "type": "function",
        "function": {"name": "f", "arguments": json.dumps(arguments)},
    }
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"type": "object", "z": 1, "a": 2}},
    }
    sent = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": None, "reasoning_content": "R", "tool_calls": [call]},
        {"role": "tool", "content": "T", "tool_call_id": "call_a12"},
    ]
    theirs = json.loads(json.dumps(sent))
    theirs[1]["tool_calls"][0]["function"]["arguments"] = arguments
    wanted = transformers_render(
        [theirs], tools=[tool], chat_template=sources.JSON_TOOLS, add_generation_prompt=True
    )
    assert TEMPLATES["JSON_TOOLS"].render(Chat(messages=parse_messages(sent), tools=(tool,))) == wanted
    wanted = transformers_render([theirs], chat_template=sources.DROPS_REASONING, add_generation_prompt=True)
    assert TEMPLATES["DROPS_REASONING"].render(Chat(messages=parse_messages(sent))) == wanted
