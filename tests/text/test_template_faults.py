"""Conversations that were shown wrongly to a model: each as sent by a client, with a model folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from contract.errors import InvalidRequestError
from tests.text import template_sources as sources
from tests.text.tiny_model import model_files, write_model
from text.chat import Chat, parse_messages
from text.model_card import ModelCard
from text.tools import parse_tools

USER = {"role": "user", "content": "What is the weather?"}
RESULT = {"role": "tool", "tool_call_id": "call_0123456789abcdef01234567", "content": "sunny"}


def rendered(folder: Path, template: str, messages: list[Any], *, tools: Any = None, **options: Any) -> str:
    config = {"chat_template": template, "bos_token": "<|bos|>", "eos_token": "<|end|>"}
    files = model_files() | {"tokenizer_config.json": json.dumps(config).encode()}
    card = ModelCard.from_folder(write_model(folder / "tiny", files))
    assert card.chat_template is not None
    return card.chat_template.render(
        Chat(messages=parse_messages(messages), tools=parse_tools(tools), **options)
    )


def calling(
    arguments: str = '{"city": "Paris"}', content: Any = None, **message: Any
) -> list[dict[str, Any]]:
    call = {
        "id": RESULT["tool_call_id"],
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }
    return [USER, {"role": "assistant", "content": content, "tool_calls": [call], **message}, RESULT]


def test_a_tool_is_shown_in_the_clients_order(tmp_path: Path) -> None:
    """F1: a tool was shown as parameters, name, description."""
    function = {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {}},
        "strict": True,
    }
    tool = {"type": "function", "function": function}
    prompt = rendered(tmp_path, sources.JSON_TOOLS, [USER], tools=[tool])
    assert json.dumps(tool) in prompt
    bare = {"type": "function", "function": {"name": "g", "description": None}}
    assert json.dumps(bare) in rendered(tmp_path, sources.JSON_TOOLS, [USER], tools=[bare])


@pytest.mark.parametrize("content", [None, ""])
def test_a_call_beside_null_is_shown(content: Any, tmp_path: Path) -> None:
    """F2: null became the empty string, and the call vanished."""
    prompt = rendered(tmp_path, sources.NULL_CONTENT, calling(content=content))
    assert '<C>get_weather {"city": "Paris"}</C>' in prompt
    assert "<A></A>" not in prompt


def test_text_beside_a_call_is_shown_too(tmp_path: Path) -> None:
    """F2: a template that writes either text or calls gets two messages."""
    prompt = rendered(tmp_path, sources.NULL_CONTENT, calling(content="Let me see."))
    assert '<A>Let me see.</A><C>get_weather {"city": "Paris"}</C><T>sunny</T>' in prompt


def test_a_template_that_concatenates_arguments_gets_text(tmp_path: Path) -> None:
    """F3: arguments were an object for every template."""
    prompt = rendered(tmp_path, sources.CONCATENATES, calling('{"city":  "Paris"}'))
    assert '[get_weather {"city":  "Paris"}]' in prompt


def test_a_template_that_loops_over_parts_gets_parts(tmp_path: Path) -> None:
    """F4: a safety model's prompt had no user text at all."""
    messages = [USER, {"role": "assistant", "content": "Sunny."}]
    prompt = rendered(tmp_path, sources.PARTS_ONLY, messages)
    assert "User: What is the weather?\nAssistant: Sunny.\nVerdict:" in prompt


@pytest.mark.parametrize(
    ("template", "lost"),
    [
        (sources.LAST_TWO, "messages[0].content"),
        (sources.FIRST_USER, "messages[1].content"),
        (sources.TRUNCATES, "messages[2].content"),
        (sources.UPPER, "messages[0].content"),
        (sources.IGNORES, "messages[0].content"),
    ],
)
def test_a_prompt_that_lost_a_message_is_not_served(template: str, lost: str, tmp_path: Path) -> None:
    """F4: what a template drops is named, and nothing is served; short texts that are in the markup count as lost."""
    messages = [
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": "s"},
        {"role": "user", "content": "b" * 50},
    ]
    with pytest.raises(InvalidRequestError, match="does not show") as caught:
        rendered(tmp_path, template, messages)
    assert caught.value.param == lost


def test_a_developer_message_is_shown_by_a_template_that_only_looks_as_if_it_knew_the_role(
    tmp_path: Path,
) -> None:
    """F5: a variable named developer_preamble made developer messages vanish."""
    messages = [{"role": "developer", "content": "Speak French."}, USER]
    assert "<system>Speak French.<user>" in rendered(tmp_path, sources.TRAP, messages)


@pytest.mark.parametrize(
    "template", [sources.ONE_SYSTEM, sources.LOSES_SYSTEMS, sources.TRAP, sources.NO_SYSTEM]
)
@pytest.mark.parametrize("roles", [("system", "developer"), ("developer", "system"), ("system", "system")])
def test_neighbouring_system_messages_are_shown(
    roles: tuple[str, str], template: str, tmp_path: Path
) -> None:
    """F6: templates refused the second one, or lost one of them."""
    messages = [{"role": roles[0], "content": "Rule A."}, {"role": roles[1], "content": "Rule B."}, USER]
    prompt = rendered(tmp_path, template, messages)
    assert prompt.index("Rule A.") < prompt.index("Rule B.") < prompt.index("What is")


@pytest.mark.parametrize(
    "template", [sources.ONE_SYSTEM, sources.LOSES_SYSTEMS, sources.TRAP, sources.GENERIC]
)
def test_a_later_system_message_is_shown(template: str, tmp_path: Path) -> None:
    """F6: a system message within the conversation stays there."""
    answer = {"role": "assistant", "content": "Sunny."}
    first, later = {"role": "system", "content": "Rule A."}, {"role": "system", "content": "Rule B."}
    prompt = rendered(tmp_path, template, [first, USER, answer, later, USER])
    assert "Rule A." in prompt and "Rule B." in prompt
    assert "Rule B." in rendered(tmp_path, template, [USER, answer, later, USER])


@pytest.mark.parametrize("last", ["end", "<|im_end|>", "assistant", "\n end ", "im_end|>\n", "e"])
def test_the_final_message_is_continued_where_it_ends(last: str, tmp_path: Path) -> None:
    """F7: the content was searched in the prompt, and found in the markup."""
    messages = [USER, {"role": "assistant", "content": last}]
    options: Any = {"add_generation_prompt": False, "continue_final_message": True}
    prompt = rendered(tmp_path, sources.GENERIC, messages, **options)
    assert prompt == f"<|im_start|>user\nWhat is the weather?<|im_end|>\n<|im_start|>assistant\n{last}"
    trimmed = rendered(tmp_path, sources.TRIMS, messages, **options)
    assert trimmed == f"<user>What is the weather?</s><assistant>{last.strip()}"


@pytest.mark.parametrize(
    ("template", "tags"),
    [
        (sources.READS_THINKING, "[Hm.]"),
        (sources.READS_REASONING, "[Hm.]"),
        (sources.DROPS_REASONING, "<think>Hm.</think>"),
    ],
)
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_earlier_reasoning_is_given_by_the_name_that_a_template_reads(
    name: str, template: str, tags: str, tmp_path: Path
) -> None:
    """F9: reasoning was given as reasoning_content only."""
    assert tags in rendered(tmp_path, template, calling(**{name: "Hm."}))


BROKEN = [
    '{"city": "Par',
    '{"city": "a\nb"}',
    '{"city": NaN}',
    '{"city": 1,}',
    '["A"]',
    '"A"',
    "A b",
    '{"a": 1, "a": 2}',
]


@pytest.mark.parametrize("arguments", BROKEN)
@pytest.mark.parametrize(
    "template",
    [
        sources.JSON_TOOLS,
        sources.CONCATENATES,
        sources.NULL_CONTENT,
        sources.GOES_THROUGH_ARGUMENTS,
        sources.SHORT_IDS,
        sources.GENERIC,
        sources.NO_SYSTEM,
    ],
)
def test_calls_with_any_arguments_are_accepted_in_a_conversation(
    arguments: str, template: str, tmp_path: Path
) -> None:
    """F10: arguments that are no JSON object ended the conversation."""
    prompt = rendered(tmp_path, template, calling(arguments))
    spellings = (arguments, json.dumps(arguments)[1:-1])
    assert any(one in prompt for one in (*spellings, json.dumps(spellings[1])[1:-1]))
    assert "sunny" in prompt and "get_weather" in prompt


def test_an_answer_of_reasoning_alone_is_accepted_in_a_conversation(tmp_path: Path) -> None:
    """F10: an answer with content null and reasoning ended the conversation."""
    answer = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning": "Hm.",
        "reasoning_content": "Hm.",
    }
    for template in (sources.GENERIC, sources.DROPS_REASONING, sources.READS_THINKING, sources.NULL_CONTENT):
        prompt = rendered(tmp_path, template, [USER, answer, {"role": "user", "content": "And?"}])
        assert "And?" in prompt and "None" not in prompt


def test_ids_of_calls_are_shortened_for_templates_that_want_nine_characters(tmp_path: Path) -> None:
    """F10: ids made here, or by another service, ended the conversation with models of Mistral's kind."""
    prompt = rendered(tmp_path, sources.SHORT_IDS, calling())
    (call_id,) = {part[:9] for part in prompt.split('id": "')[1:]}
    assert call_id.isalnum() and prompt.count(call_id) == 2


def test_documents_that_a_template_does_not_show_are_refused(tmp_path: Path) -> None:
    """F4: documents were dropped in silence."""
    with pytest.raises(InvalidRequestError) as caught:
        rendered(tmp_path, sources.GENERIC, [USER], documents=({"title": "t", "text": "Some fact."},))
    assert caught.value.param == "documents[0].text"


def test_tools_that_a_template_does_not_show_stand_in_the_system_message(tmp_path: Path) -> None:
    """F4: tools were dropped in silence."""
    tool = {"type": "function", "function": {"name": "get_weather", "description": "d"}}
    for template in (sources.GENERIC, sources.NO_SYSTEM, sources.ONE_SYSTEM, sources.PARTS_ONLY):
        assert json.dumps(tool) in rendered(tmp_path, template, [USER], tools=[tool])
