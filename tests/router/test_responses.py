"""/v1/responses over real sockets: the objects, and the events of their streams."""

import json
from pathlib import Path
from typing import Any

import pytest

from contract.errors import TransferError
from contract.identity import Role
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.router.test_ends import cancelled_on, nothing_is_left
from tests.router.test_grammars import grammars_of
from tests.router.tool_cluster import prompt_of, writing_cluster
from tests.text.tiny_model import END, byte_ids

PATH = "/v1/responses"
ASK: dict[str, Any] = {"input": "hi"}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
NOW = {"type": "function", "name": "now"}
PARIS = '{"city": "Paris"}'
ALL = (
    "<think>\nHm, 世界.\n</think>\n\nI look.\n"
    f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call> Done.'
)
PARSERS: dict[str, Any] = {"reasoning_parser": "think", "tool_parser": "hermes"}
BYTES = Script(tokens=[*byte_ids(b"abc"), END])
TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


ECHO = {
    "instructions": "Be brief.",
    "max_output_tokens": 7,
    "metadata": {"team": "a"},
    "temperature": 0.5,
    "top_p": 1.0,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "reasoning": {"effort": None, "summary": None},
    "top_logprobs": 0,
    "truncation": "disabled",
    "service_tier": "default",
    "store": False,
    "background": False,
    "previous_response_id": None,
    "max_tool_calls": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "user": "u",
}
"""The fields of the request in ``test_the_whole_object``."""


async def events_of(cluster: Cluster, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a stream's events; each names its type twice and has the next number."""
    async with cluster.session.post(cluster.url(PATH), json={**body, "stream": True}) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        text = await response.text()
    assert text.endswith("\n\n")
    events = []
    for number, written in enumerate(text.removesuffix("\n\n").split("\n\n")):
        name, data = written.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """Return the parts that two answers to one request have in common."""
    output = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in response["output"]
    ]
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": output}


async def test_the_whole_object() -> None:
    body = {
        **ASK,
        "instructions": "Be brief.",
        "metadata": {"team": "a"},
        "user": "u",
        "temperature": 0.5,
        "max_output_tokens": 7,
        "store": True,
    }
    async with running_cluster(BYTES) as cluster:
        answer = await cluster.session.post(cluster.url(PATH), json=body)
        response = await answer.json()
    assert (answer.status, answer.headers["x-kvbaton-request-id"]) == (200, response["id"])
    (item,) = response["output"]
    assert response["id"].startswith("resp_") and item["id"].startswith("msg_")
    assert isinstance(response.pop("created_at"), int)
    assert isinstance(response.pop("completed_at"), int)
    part = {"type": "output_text", "text": "abc", "annotations": [], "logprobs": []}
    assert response == {
        "id": response["id"],
        "object": "response",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": "tiny",
        "output": [
            {
                "id": item["id"],
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [part],
            }
        ],
        "usage": {
            "input_tokens": response["usage"]["input_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 4,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": response["usage"]["input_tokens"] + 4,
        },
        **ECHO,
    }


async def test_the_events_of_a_text() -> None:
    async with running_cluster(BYTES) as cluster:
        events = await events_of(cluster, ASK)
        _, whole = await cluster.post(PATH, ASK)
        await nothing_is_left(cluster)
    kinds = [event["type"] for event in events]
    assert list(dict.fromkeys(kinds)) == TEXT_EVENTS
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == events[-4]["text"] == "abc"
    assert events[0]["response"]["status"] == "in_progress"
    assert (events[0]["response"]["output"], events[0]["response"]["usage"]) == ([], None)
    assert events[2]["item"]["content"] == []
    assert events[-2]["item"] == events[-1]["response"]["output"][0]
    assert without_ids(events[-1]["response"]) == without_ids(whole)


async def test_an_answer_that_is_too_long_is_incomplete() -> None:
    body = {**ASK, "max_output_tokens": 2}
    async with running_cluster(BYTES) as cluster:
        events = await events_of(cluster, body)
        _, whole = await cluster.post(PATH, body)
    assert events[-1]["type"] == "response.incomplete"
    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["completed_at"] is None
    assert (whole["output"][0]["status"], whole["output"][0]["content"][0]["text"]) == ("incomplete", "ab")
    assert without_ids(events[-1]["response"]) == without_ids(whole)


async def test_an_answer_of_nothing_is_an_empty_message() -> None:
    async with running_cluster(Script(tokens=[END])) as cluster:
        _, whole = await cluster.post(PATH, ASK)
    assert whole["output"][0]["content"][0]["text"] == ""


@pytest.mark.parametrize("tokens_per_step", [1, 7, 1000])
async def test_reasoning_text_and_calls_are_items_in_their_order(
    tokens_per_step: int, tmp_path: Path
) -> None:
    body = {**ASK, "tools": [WEATHER, NOW]}
    script = {"tokens_per_step": tokens_per_step}
    async with writing_cluster(tmp_path, ALL, script=script, **PARSERS) as cluster:
        status, whole = await cluster.post(PATH, body)
        events = await events_of(cluster, body)
    assert status == 200
    thought, said, weather, now, last = whole["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, 世界."}]
    assert said["content"][0]["text"] == "I look."
    assert (weather["name"], weather["arguments"]) == ("get_weather", PARIS)
    assert (now["name"], now["arguments"]) == ("now", "{}")
    assert weather["call_id"] != now["call_id"]
    assert last["content"][0]["text"] == "\nDone."
    assert len({item["id"] for item in whole["output"]}) == 5
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    for index, item in enumerate(events[-1]["response"]["output"]):
        own = [event for event in events if event.get("output_index") == index]
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}
        assert (own[0]["type"], own[-1]["type"]) == (
            "response.output_item.added",
            "response.output_item.done",
        )
        written = "".join(event.get("delta", "") for event in own)
        assert written == (item.get("arguments") or item["content"][0]["text"])
        assert [event["output_index"] for event in events if event in own] == [index] * len(own)
    indexes = [event["output_index"] for event in events if "output_index" in event]
    assert indexes == sorted(indexes)
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_a_conversation_reaches_the_template(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% if m.reasoning_content %}~{{ m.reasoning_content }}{% endif %}"
        "{% for c in m.tool_calls %}!{{ c.id }}={{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
        "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}|{% endfor %}"
    )
    call = {"type": "function_call", "name": "get_weather", "arguments": PARIS}
    items = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
        {
            "id": "msg_1",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "A", "annotations": []}],
        },
        {**call, "call_id": "c1"},
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "wet"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "kept"}]},
        {"role": "user", "content": "x"},
    ]
    async with writing_cluster(tmp_path, "ok", template=template) as cluster:
        status, answer = await cluster.post(PATH, {"input": items, "instructions": "I"})
        assert status == 200, answer
        assert prompt_of(cluster) == (
            f"system:I|system:D|user:a\nb|assistant:A~R!c1=get_weather({PARIS})!c2=get_weather({PARIS})|"
            "tool:sunny#c1|tool:wet#c2|assistant:~kept|user:x|"
        )


async def test_a_text_format_reaches_both_legs() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    flat = {"type": "json_schema", "name": "it", "strict": True, "schema": schema}
    written = json.dumps(schema, separators=(",", ":"))
    for form, wanted in ((flat, ("json_schema", written)), ({"type": "json_object"}, ("json_object", ""))):
        async with running_cluster(BYTES) as cluster:
            status, answer = await cluster.post(PATH, {**ASK, "text": {"format": form}})
            assert (status, answer["text"]["format"]) == (200, form)
            assert grammars_of(cluster) == [wanted, wanted]


async def test_a_forced_call(tmp_path: Path) -> None:
    body = {
        **ASK,
        "tools": [WEATHER, NOW],
        "tool_choice": {"type": "function", "name": "get_weather"},
        "parallel_tool_calls": False,
    }
    async with writing_cluster(tmp_path, PARIS) as cluster:
        _, answer = await cluster.post(PATH, body)
        grammar = grammars_of(cluster)[0]
    assert grammar is not None
    assert (grammar[0], json.loads(grammar[1])) == ("json_schema", WEATHER["parameters"])
    (call,) = answer["output"]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "get_weather", PARIS)
    assert answer["tool_choice"] == body["tool_choice"]
    assert answer["parallel_tool_calls"] is False


async def test_log_probabilities_are_those_of_the_text(tmp_path: Path) -> None:
    body = {**ASK, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    async with writing_cluster(tmp_path, "<think>Hm.</think>añ", **PARSERS) as cluster:
        _, whole = await cluster.post(PATH, body)
        events = await events_of(cluster, body)
        _, plain = await cluster.post(PATH, ASK)
    (part,) = whole["output"][1]["content"]
    assert bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]) == "añ".encode()
    streamed = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    assert [len(entries) for entries in streamed] == [1, 2]
    assert [entry for entries in streamed for entry in entries] == part["logprobs"]
    assert plain["output"][1]["content"][0]["logprobs"] == []


async def test_an_error_in_mid_stream_is_reported_twice_and_ends_it() -> None:
    script = Script(tokens=[*byte_ids(b"abcdef"), END], fail_at=3, error=TransferError("the digest differs"))
    async with running_cluster(script, (Role.AGGREGATED,), max_replays=0) as cluster:
        events = await events_of(cluster, ASK)
        await nothing_is_left(cluster)
    *_, error, failed = events
    assert (error["type"], error["code"], failed["type"]) == ("error", "transfer_failed", "response.failed")
    assert "the digest differs" in error["message"]
    response = failed["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert response["error"]["message"] == error["message"]
    assert (response["output"][0]["status"], response["output"][0]["content"][0]["text"]) == (
        "incomplete",
        "abc",
    )


async def test_an_error_before_the_first_token_is_a_status() -> None:
    async with running_cluster(BYTES, ()) as cluster:
        status, answer = await cluster.post(PATH, {**ASK, "stream": True})
    assert (status, answer["error"]["type"]) == (503, "server_error")


async def test_a_client_that_goes_away_cancels_its_stream() -> None:
    script = Script(tokens=[*byte_ids(b"abcdef"), END], stall_at=1)
    async with running_cluster(script) as cluster:
        response = await cluster.session.post(cluster.url(PATH), json={**ASK, "stream": True})
        assert await response.content.readline() == b"event: response.created\n"
        response.close()
        await cancelled_on(*cluster.workers.values())
        await nothing_is_left(cluster)
