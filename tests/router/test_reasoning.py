"""Reasoning in /v1/chat/completions: separated from the answer, under both names, and counted."""

from pathlib import Path
from typing import Any

import pytest

from tests.router.tool_cluster import ASK, CHAT, choices, first_special, joined, prompt_of, writing_cluster
from tests.text.tiny_model import byte_ids

SAY = {"messages": [{"role": "user", "content": "hi"}]}
THOUGHT = "<think>\nHm, 世界.\n</think>\n\nYes. "


@pytest.mark.parametrize("tokens_per_step", [1, 5, 1000])
async def test_whole_and_streamed(tokens_per_step: int, tmp_path: Path) -> None:
    script = {"tokens_per_step": tokens_per_step}
    async with writing_cluster(tmp_path, THOUGHT, script=script, reasoning_parser="think") as cluster:
        _, whole = await cluster.post(CHAT, SAY)
        streamed = joined(await cluster.stream(CHAT, SAY))
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {
        "role": "assistant",
        "content": "Yes. ",
        "refusal": None,
        "reasoning_content": "Hm, 世界.",
        "reasoning": "Hm, 世界.",
    }
    assert streamed == {
        "content": "Yes. ",
        "reasoning_content": "Hm, 世界.",
        "reasoning": "Hm, 世界.",
        "calls": [],
        "finish_reason": "stop",
    }


async def test_a_template_that_opens_the_reasoning(tmp_path: Path) -> None:
    body = {**SAY, "chat_template_kwargs": {"thinking": True}}
    async with writing_cluster(tmp_path, "Hm.</think>Yes.", reasoning_parser="think") as cluster:
        _, answer = await cluster.post(CHAT, body)
        assert prompt_of(cluster).endswith("assistant: <think>")
        _, plain = await cluster.post(CHAT, SAY)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    assert plain["choices"][0]["message"]["content"] == "Hm.</think>Yes."


async def test_an_answer_that_ends_in_its_reasoning_has_no_content(tmp_path: Path) -> None:
    async with writing_cluster(tmp_path, THOUGHT, reasoning_parser="think") as cluster:
        _, answer = await cluster.post(CHAT, {**SAY, "max_tokens": 11})
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
    assert choice["message"]["reasoning_content"] == "Hm,"


async def test_reasoning_tokens_are_counted_with_their_tags(tmp_path: Path) -> None:
    special = ("<think>", "</think>")
    opening, closing = first_special(), first_special() + 1
    tokens = [opening, *byte_ids(b"Hm."), closing, *byte_ids(b"Yes.")]
    body = {**SAY, "stream_options": {"include_usage": True}}
    async with writing_cluster(tmp_path, tokens, special=special, reasoning_parser="think") as cluster:
        _, whole = await cluster.post(CHAT, SAY)
        *_, last, _ = await cluster.stream(CHAT, body)
    assert whole["usage"]["completion_tokens"] == 10
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
    assert last["usage"] == whole["usage"]


async def test_other_tags(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"reasoning_parser": "think", "reasoning_tags": "[THINK] [/THINK]"}
    async with writing_cluster(tmp_path, "[THINK]Hm.[/THINK]<think>", **settings) as cluster:
        _, answer = await cluster.post(CHAT, SAY)
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "<think>")


@pytest.mark.parametrize(
    ("template", "settings", "is_split"),
    [
        ("{{ messages[0].content.split('</think>')[-1] }}<think>", {}, True),
        ("{{ messages[0].content.split('</think>')[-1] }}<think>", {"reasoning_parser": "none"}, False),
        ("{{ messages[0].content }}", {}, False),
    ],
)
async def test_auto_looks_at_the_template(
    template: str, settings: dict[str, Any], is_split: bool, tmp_path: Path
) -> None:
    async with writing_cluster(tmp_path, "a</think>b", template=template, **settings) as cluster:
        _, answer = await cluster.post(CHAT, SAY)
    assert answer["choices"][0]["message"]["content"] == ("b" if is_split else "a</think>b")


async def test_text_completions_are_the_models_own_text(tmp_path: Path) -> None:
    async with writing_cluster(tmp_path, THOUGHT, reasoning_parser="think") as cluster:
        _, answer = await cluster.post("/v1/completions", {"prompt": "<think>", "max_tokens": 100})
    assert answer["choices"][0]["text"] == THOUGHT
    assert "completion_tokens_details" not in answer["usage"]


async def test_reasoning_then_a_call(tmp_path: Path) -> None:
    text = '<think>I call <tool_call>.</think>\n\n<tool_call>{"name": "now"}</tool_call>'
    settings: dict[str, Any] = {"reasoning_parser": "think", "tool_parser": "hermes"}
    async with writing_cluster(tmp_path, text, **settings) as cluster:
        _, whole = await cluster.post(CHAT, ASK)
        found = choices(await cluster.stream(CHAT, ASK))
    message = whole["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == (None, "I call <tool_call>.")
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    kinds = [next(iter(choice["delta"]), "end") for choice in found]
    assert list(dict.fromkeys(kinds)) == ["role", "reasoning_content", "tool_calls", "end"]


async def test_the_final_message_is_continued(tmp_path: Path) -> None:
    conversation = [*SAY["messages"], {"role": "assistant", "content": "Once upon"}]
    body = {"messages": conversation, "continue_final_message": True}
    async with writing_cluster(tmp_path, " a time.") as cluster:
        _, answer = await cluster.post(CHAT, body)
        assert prompt_of(cluster) == "user: hi;assistant: Once upon"
        await cluster.post(CHAT, {**SAY, "add_generation_prompt": False})
        assert prompt_of(cluster) == "user: hi;"
    assert answer["choices"][0]["message"]["content"] == " a time."
