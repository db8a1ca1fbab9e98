"""Contents of messages from clients of several APIs: other names of parts, empty lists, old forms of calls."""

from typing import Any

import pytest

from contract.errors import InvalidRequestError, UnsupportedFieldError
from router.http.bodies.body import Body
from router.http.fields.offered_tools import OfferedTools
from router.http.responses.conversation import response_chat
from router.http.schema.responses import RESPONSE
from text.chat import parse_messages

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("part", "parsed"),
    [
        (
            {"type": "text", "text": "a", "cache_control": None},
            {"type": "text", "text": "a", "cache_control": None},
        ),
        ({"type": "input_text", "text": "a"}, {"type": "text", "text": "a"}),
        ({"type": "output_text", "text": "a", "annotations": []}, {"type": "text", "text": "a"}),
        ({"type": "refusal", "refusal": "No."}, {"type": "text", "text": "No."}),
    ],
)
def test_a_part_is_a_text_by_any_of_its_names(part: dict[str, Any], parsed: dict[str, Any]) -> None:
    """OpenAI's own types have refusals as parts of an assistant's message."""
    (_, message) = parse_messages([USER, {"role": "assistant", "content": [part]}])
    assert message["content"] == [parsed]


@pytest.mark.parametrize("role", ["assistant", "tool"])
def test_an_empty_list_of_parts_is_an_empty_content(role: str) -> None:
    """Agents write it beside calls, and as the result of a tool that returns nothing."""
    (_, message) = parse_messages([USER, {"role": role, "content": []}])
    assert message["content"] == ""


@pytest.mark.parametrize("key", ["function_call", "audio"])
def test_what_no_template_is_given_is_refused_by_name(key: str) -> None:
    """F4: a call in its old form was dropped in silence."""
    message = {"role": "assistant", "content": None, key: {"name": "now", "arguments": "{}", "id": "a"}}
    with pytest.raises(UnsupportedFieldError) as caught:
        parse_messages([USER, message])
    assert caught.value.param == f"messages[1].{key}"
    assert parse_messages([USER, {**message, key: None}])[1] == {"role": "assistant", "content": None}


def test_reasoning_that_is_empty_by_one_name_counts_by_another() -> None:
    message = {"role": "assistant", "content": "a", "reasoning_content": "", "reasoning": "Hm."}
    assert parse_messages([USER, message])[1]["reasoning_content"] == "Hm."


def test_parts_of_responses_stay_parts_as_those_of_chats_do() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    items = [
        {"role": "developer", "content": parts},
        {"role": "user", "content": parts},
        {"role": "user", "content": parts[:1]},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "c"}, {"type": "refusal", "refusal": "d"}],
        },
    ]
    kept = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = response_chat(Body({"input": items}, RESPONSE), OfferedTools()).messages
    assert [message["content"] for message in messages] == [kept, kept, "a", "c\nd"]


def test_a_result_that_is_null_is_empty() -> None:
    """Tools that return nothing send it. A result without the key is still a mistake, as is a null question."""
    (_, message) = parse_messages([USER, {"role": "tool", "tool_call_id": "a", "content": None}])
    assert message["content"] == ""
    for wrong in ({"role": "tool", "tool_call_id": "a"}, {"role": "user", "content": None}):
        with pytest.raises(InvalidRequestError, match="content is missing"):
            parse_messages([USER, wrong])
