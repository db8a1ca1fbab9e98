"""Requests as Claude Code sends them, written by hand: each turn's prompt is that of the turn before, and the new turn."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.router.test_agent_requests import BILLING
from tests.router.test_messages import PATH
from tests.router.tool_cluster import prompt_of, writing_cluster
from tests.text import agent_templates

READ = {
    "name": "Read",
    "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string", "description": "p"}}},
}
HOSTED = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
CACHED = {"cache_control": {"type": "ephemeral"}}
REMINDER = "<system-reminder>\nThe list of tasks is empty.\n</system-reminder>"


def body_of(number: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the body of a turn: its billing line differs, and the mark of the cache stands at the last message."""
    *before, last = messages
    marked = {**last, "content": [*last["content"][:-1], {**last["content"][-1], **CACHED}]}
    return {
        "model": "tiny",
        "max_tokens": 32_000,
        "metadata": {"user_id": f"user_{number}_session"},
        "thinking": {"type": "enabled", "budget_tokens": 31_999},
        "system": [
            {"type": "text", "text": BILLING.format(f"{number:05x}")},
            {"type": "text", "text": "You are an agent.", **CACHED},
            {"type": "text", "text": "Be brief.", **CACHED},
        ],
        "tools": [READ, HOSTED],
        "messages": [*before, marked],
    }


def step(number: int) -> list[dict[str, Any]]:
    """Return the model's call, the tool's result, and the system message that follows it."""
    thought = {"type": "thinking", "thinking": f"I think {number}.", "signature": "x"}
    used = {"type": "tool_use", "id": f"toolu_{number}", "name": "Read", "input": {"path": f"{number}.py"}}
    result = {
        "type": "tool_result",
        "tool_use_id": f"toolu_{number}",
        "content": [{"type": "text", "text": f"content {number}"}],
    }
    return [
        {"role": "assistant", "content": [thought, used]},
        {"role": "user", "content": [result]},
        {"role": "system", "content": [{"type": "text", "text": f"Mind step {number}."}]},
    ]


@pytest.mark.parametrize("form", ["QWEN35", "GPT_OSS", "MINIMAX", "MISTRAL_SMALL", "DEEPSEEK_V4"])
async def test_a_turn_computes_only_what_is_new(tmp_path: Path, form: str) -> None:
    """C2 and C3: the billing line and the system messages behind results let each turn compute everything anew."""
    asked = [{"type": "text", "text": REMINDER}, {"type": "text", "text": "Look."}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": asked}]
    prompts = []
    template = agent_templates.ALL[form]
    parsers: dict[str, Any] = {"tool_parser": "hermes", "reasoning_parser": "none"}
    async with writing_cluster(tmp_path, "ok", template=template, **parsers) as cluster:
        for number in range(4):
            async with cluster.session.post(cluster.url(PATH), json=body_of(number, messages)) as response:
                assert response.status == 200, await response.text()
                assert response.headers["x-kvbaton-tools-left-out"] == HOSTED["type"]
            prompts.append(prompt_of(cluster))
            messages += step(number)
    for number, (earlier, later) in enumerate(pairwise(prompts)):
        end = earlier.rindex(f"Mind step {number - 1}." if number else "Look.")
        assert later.startswith(earlier[:end])
        assert f"content {number}" in later[end:]
        assert len(later) - end < 600
