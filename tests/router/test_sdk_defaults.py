"""Fields that SDKs and coding agents send by default: effort, verbosity, truncation and storage."""

from pathlib import Path
from typing import Any

import pytest

from tests.router.cluster import Cluster, running_cluster
from tests.router.test_bad_input import check_error
from tests.router.test_responses import BYTES
from tests.router.tool_cluster import CHAT, prompt_of, writing_cluster

RESPONSES = "/v1/responses"
TEMPLATE = (
    "{{ reasoning_effort | default('-') }} {{ enable_thinking | default('-') }} {{ thinking | default('-') }}"
    " {{ verbosity | default('-') }}|{% for m in messages %}{{ m.content }}{% endfor %}"
)
TOLD: list[tuple[dict[str, Any], str]] = [
    ({}, "- - - -"),
    ({"effort": None, "verbosity": None}, "- - - -"),
    ({"effort": "high"}, "high True True -"),
    ({"effort": "minimal", "verbosity": "low"}, "minimal True True low"),
    ({"effort": "none"}, "none False False -"),
    ({"verbosity": "medium"}, "- - - medium"),
]
AGENT: dict[str, Any] = {
    "instructions": "You are a coding agent.",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "prompt_cache_retention": "24h",
    "text": {"verbosity": "low"},
    "service_tier": "auto",
    "truncation": "auto",
    "metadata": {"a": "b"},
    "safety_identifier": "u",
    "user": "u",
    "client_metadata": {"x": "y"},
}


def told(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a body with an effort and a verbosity."""
    if path == CHAT:
        names = {"effort": "reasoning_effort", "verbosity": "verbosity"}
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
        return body | {names[name]: value for name, value in fields.items()}
    body = {"input": "hi"}
    if "effort" in fields:
        body["reasoning"] = {"effort": fields["effort"], "summary": "detailed"}
    if "verbosity" in fields:
        body["text"] = {"verbosity": fields["verbosity"]}
    return body


async def answered(cluster: Cluster, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = await cluster.post(path, body)
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_effort_and_verbosity_reach_the_template_by_the_names_that_it_reads(
    path: str, tmp_path: Path
) -> None:
    """A choice: ``reasoning_effort`` and ``verbosity``, which agents send by default, were rejected."""
    async with writing_cluster(tmp_path, "x", template=TEMPLATE, strict_api=True) as cluster:
        for fields, variables in TOLD:
            await answered(cluster, path, told(path, fields))
            assert prompt_of(cluster).startswith(f"{variables}|"), fields
        given = {"chat_template_kwargs": {"enable_thinking": False}}
        await answered(cluster, path, {**told(path, {"effort": "high"}), **given})
        assert prompt_of(cluster).startswith("high False True -|"), "the template's own variables come first"


async def test_what_a_coding_agent_sends_is_served_and_comes_back(tmp_path: Path) -> None:
    """A choice: ``reasoning.summary``, ``text.verbosity`` and ``truncation`` of agents were 400."""
    async with writing_cluster(tmp_path, "x", template=TEMPLATE, strict_api=True) as cluster:
        answer = await answered(cluster, RESPONSES, AGENT)
    assert answer["reasoning"] == {"effort": "medium", "summary": "auto"}
    assert answer["text"]["verbosity"] == "low"
    assert (answer["truncation"], answer["store"]) == ("disabled", False), "what was done, not what was asked"


async def test_with_truncation_auto_nothing_is_left_out_of_a_long_input() -> None:
    """A choice: an input that is too long is rejected, not truncated."""
    async with running_cluster(BYTES) as cluster:
        status, answer = await cluster.post(RESPONSES, {"input": "x" * 500, "truncation": "auto"})
        error = check_error(answer, status, "input")
    assert (status, error["code"]) == (400, "context_length_exceeded")
