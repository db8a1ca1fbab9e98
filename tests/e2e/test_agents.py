"""Turns of agents through a real engine: the second prompt is served from the prefix cache, on each API and form.

The requests are written by hand in the shape in which Claude Code (Messages), codex (Responses) and opencode (chats)
send them; ``tests/sdk/test_agents.py`` runs the agents themselves.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from contract.identity import Role
from tests.agent_checkpoint import DONE, FORMS, make_agent_checkpoint
from tests.e2e.in_process import running_in_process
from tests.router.test_agent_requests import BILLING

pytestmark = [pytest.mark.e2e]

Json = dict[str, Any]
PROMPT = (Path(__file__).resolve().parents[2] / "docs" / "tools.md").read_text()
"""The system prompt of the agent: about 2,000 tokens. Each API begins it with another word, and so shares no prefix."""
SCHEMA: Json = {"type": "object", "properties": {"path": {"type": "string", "description": "p"}}}
READ: Json = {"name": "read", "description": "Reads a file.", "parameters": SCHEMA}
ARGUMENTS = {"path": "notes.txt"}
ASKED, FOUND, MIND = "Read the file notes.txt", "the moose sleeps at noon", "Mind the time."


def messages_turn(number: int, answer: Json | None) -> Json:
    """Return the body of a turn as Claude Code sends it: a billing line that differs, and a system message at the end."""
    turns: list[Json] = [{"role": "user", "content": [{"type": "text", "text": ASKED}]}]
    if answer:
        (used,) = [block for block in answer["content"] if block["type"] == "tool_use"]
        assert (used["name"], used["input"]) == ("read", ARGUMENTS)
        result = {"type": "tool_result", "tool_use_id": used["id"], "content": FOUND}
        turns += [
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [result]},
            {"role": "system", "content": [{"type": "text", "text": MIND}]},
        ]
    billing = {"type": "text", "text": BILLING.format(f"{number:05x}")}
    tool = {"name": READ["name"], "description": READ["description"], "input_schema": SCHEMA}
    return {
        "max_tokens": 32_000,
        "metadata": {"user_id": f"user_{number}_session"},
        "system": [
            billing,
            {"type": "text", "text": f"Messages. {PROMPT}", "cache_control": {"type": "ephemeral"}},
        ],
        "tools": [tool, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "messages": turns,
    }


def responses_turn(number: int, answer: Json | None) -> Json:
    """Return the body of a turn as codex sends it: instructions, a developer message, and all items again."""
    items: list[Json] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": MIND}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ASKED}]},
    ]
    if answer:
        (call,) = [item for item in answer["output"] if item["type"] == "function_call"]
        assert (call["name"], json.loads(call["arguments"])) == ("read", ARGUMENTS)
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": FOUND}
        items += [*answer["output"], result]
    return {
        "instructions": f"Responses. {PROMPT}",
        "input": items,
        "tools": [{"type": "function", "strict": False, **READ}, {"type": "web_search"}],
        "prompt_cache_key": f"session {number}",
        "store": False,
    }


def chat_turn(number: int, answer: Json | None) -> Json:
    """Return the body of a turn as opencode sends it."""
    turns: list[Json] = [{"role": "system", "content": f"Chat. {PROMPT}"}, {"role": "user", "content": ASKED}]
    if answer:
        message = answer["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("read", ARGUMENTS)
        turns += [message, {"role": "tool", "tool_call_id": call["id"], "content": FOUND}]
    tools = [{"type": "function", "function": READ}]
    return {"messages": turns, "tools": tools, "max_tokens": 32_000, "user": f"session {number}"}


Turn = Callable[[int, Json | None], Json]
APIS: dict[str, tuple[str, Turn]] = {
    "messages": ("/v1/messages", messages_turn),
    "responses": ("/v1/responses", responses_turn),
    "chat": ("/v1/chat/completions", chat_turn),
}


def counts_of(answer: Json) -> tuple[int, int]:
    """Return the numbers of tokens of a prompt, and of those that came from the prefix cache, on any API."""
    usage = answer["usage"]
    if "cache_read_input_tokens" in usage:
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]
    if "input_tokens" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], (usage["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]


def said(answer: Json) -> str:
    """Return all texts of an answer, as JSON."""
    return json.dumps(answer.get("content") or answer.get("output") or answer.get("choices"))


@pytest.mark.parametrize("form", FORMS)
async def test_the_second_turn_is_cached(tmp_path: Path, form: str) -> None:
    """C1 to C3: a tool, a billing line or a later system message let a turn fail, or compute everything anew."""
    model = make_agent_checkpoint(tmp_path / "model", form, READ["name"], ARGUMENTS)
    parser = {"tool_parser": FORMS[form].parser}
    roles = [Role.PREFILL, Role.DECODE]
    async with (
        running_in_process(tmp_path, model, roles, "shm", router_options=parser) as service,
        aiohttp.ClientSession(f"http://{service.http}") as session,
    ):
        for api, (path, turn) in APIS.items():
            answers: list[Json] = []
            for number in range(2):
                body = turn(number, answers[-1] if answers else None)
                async with session.post(path, json=body) as response:
                    answers.append(await response.json())
                    assert response.status == 200, (api, answers[-1])
            (num_tokens, _), (longer, num_cached) = map(counts_of, answers)
            assert DONE in said(answers[1]), api
            assert longer > num_tokens > 1500 and num_cached >= 0.9 * num_tokens, (api, answers)
