"""Prompts only grow: the prompt of a turn is the beginning of the prompt of the next one, whatever the template."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import InvalidRequestError
from tests.text import agent_templates, template_sources
from text.chat import Chat, parse_messages
from text.templates.chat_template import ChatTemplate
from text.templates.questions_tools import KEPT, KIND, is_continued, requests_of

SOURCES = {**template_sources.ALL, **agent_templates.ALL}
TEMPLATES = {
    name: ChatTemplate(source, bos_token="<s>", eos_token="</s>") for name, source in SOURCES.items()
}
REWRITES = {
    "NULL_CONTENT": "",
    "DROPS_REASONING": "reasoning of earlier calls",
    "SHORT_IDS": "questions",
    "QWEN35": "reasoning of earlier calls",
    "GPT_OSS": "reasoning of earlier calls",
    "MINIMAX": "reasoning of earlier calls",
    "DEEPSEEK_V4": "reasoning of earlier calls",
}
"""Template → words of its report about the earlier turns that it rewrites; all others only append."""
LATER = dict.fromkeys(
    ("QWEN35", "GPT_OSS", "MINIMAX", "MISTRAL_SMALL", "DEEPSEEK_V4", "ONE_SYSTEM"), "marked in a user turn"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string", "description": "p"}}},
    },
}
NUMBERS = st.integers(0, 2**60)
TEXTS = st.builds("text{}end".format, NUMBERS)


@st.composite
def conversations(draw: st.DrawFn, *, with_reasoning: bool) -> list[dict[str, Any]]:
    """An agent's conversation: questions, calls with results, answers, and system messages at any place between."""

    def system(odds: int) -> list[dict[str, Any]]:
        return (
            [{"role": draw(st.sampled_from(["system", "system", "developer"])), "content": draw(TEXTS)}]
            if draw(st.integers(1, odds)) == 1
            else []
        )

    def thought() -> dict[str, Any]:
        return {"reasoning_content": draw(TEXTS)} if with_reasoning and draw(st.booleans()) else {}

    messages: list[dict[str, Any]] = (
        [] if draw(st.booleans()) else [{"role": "system", "content": draw(TEXTS)}]
    )
    for _ in range(draw(st.integers(1, 3))):
        messages += [{"role": "user", "content": draw(TEXTS)}, *system(4)]
        for number in range(draw(st.integers(0, 2))):
            call: dict[str, Any] = {
                "id": f"call_{number:024d}",
                "type": "function",
                "function": {"name": "read_file", "arguments": json.dumps({"path": draw(TEXTS)})},
            }
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [call], **thought()},
                {"role": "tool", "tool_call_id": call["id"], "content": draw(TEXTS)},
                *system(2),
            ]
        messages += [{"role": "assistant", "content": draw(TEXTS), **thought()}, *system(4)]
    return [*messages, {"role": "user", "content": draw(TEXTS)}]


def rewritten_at(name: str, messages: list[dict[str, Any]]) -> list[int]:
    """Return the requests whose prompt does not continue the one before; none if the template refuses one of them."""
    conversation = Chat(messages=parse_messages(messages), tools=(TOOL,))
    requests = list(requests_of(conversation))
    try:
        prompts = [TEMPLATES[name].render(request) for request in requests]
    except InvalidRequestError:
        return []
    return [
        number
        for number in range(1, len(prompts))
        if not is_continued(
            prompts[number - 1], prompts[number], requests[number - 1].messages[-1]["content"]
        )
    ]


def report(name: str) -> dict[str, str]:
    return dict(TEMPLATES[name].report.abilities["default"])


def is_step(messages: list[dict[str, Any]], number: int) -> bool:
    """Return whether a request is another step of an agent, whose last message but systems is a tool's result."""
    request = list(requests_of(Chat(messages=parse_messages(messages))))[number]
    others = [one["role"] for one in request.messages if one["role"] not in ("system", "developer")]
    return bool(others[-1] == "tool")


@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=15, deadline=None)
@given(messages=conversations(with_reasoning=False))
def test_a_prompt_is_the_beginning_of_the_next_one(name: str, messages: list[dict[str, Any]]) -> None:
    """C3: system messages behind tool results were moved to the top, so that each turn computed everything anew."""
    found = rewritten_at(name, messages)
    kinds = report(name)[KIND]
    if "questions" not in kinds:
        rewrites_steps = "calls," in kinds
        assert [number for number in found if not rewrites_steps or is_step(messages, number)] == []


@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=15, deadline=None)
@given(messages=conversations(with_reasoning=True))
def test_only_a_template_that_says_so_rewrites(name: str, messages: list[dict[str, Any]]) -> None:
    """Reasoning of older turns is dropped by the template itself, at a new question, and the report names it."""
    found = rewritten_at(name, messages)
    kinds = report(name)[KIND]
    assert not found or kinds != KEPT
    if "questions" not in kinds and "between calls" not in kinds:
        assert not any(is_step(messages, number) for number in found)


@pytest.mark.parametrize("name", SOURCES)
def test_the_report_says_what_a_template_rewrites(name: str) -> None:
    assert REWRITES.get(name, "") in report(name)[KIND]
    assert (report(name)[KIND] == KEPT) == (not REWRITES.get(name))
    assert name not in LATER or report(name)["later system messages"] == LATER[name]


@pytest.mark.parametrize("name", agent_templates.ALL)
def test_a_later_system_message_is_marked_where_it_stands(name: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a"}'}}
    messages = [
        {"role": "system", "content": "Be good."},
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "RESULT"},
        {"role": "system", "content": "Mind the time."},
    ]
    prompt = TEMPLATES[name].render(Chat(messages=parse_messages(messages), tools=(TOOL,)))
    marked = "RESULT\n\n<system-reminder>\nMind the time.\n</system-reminder>"
    assert marked in prompt.replace("\\n", "\n")
