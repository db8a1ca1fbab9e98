"""/v1/messages: Anthropic's objects, whole and streamed."""

import json
from pathlib import Path
from typing import Any

import pytest

from contract.errors import OverloadedError
from contract.identity import Role
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.router.test_responses import BYTES
from tests.router.tool_cluster import prompt_of, writing_cluster
from tests.text.tiny_model import END, byte_ids

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
SAY: dict[str, Any] = {"max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]}
WEATHER = {
    "name": "get_weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
NOW = {"name": "now", "input_schema": {}, "type": "custom"}
TOOLS = {**SAY, "tools": [WEATHER, NOW]}
PARSERS: dict[str, Any] = {"tool_parser": "hermes", "reasoning_parser": "think"}
KEY = "sk-of-a-client"


async def events_of(cluster: Cluster, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a stream's events; each names its type twice."""
    async with cluster.session.post(cluster.url(PATH), json={**body, "stream": True}) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream"), await response.text()
        text = await response.text()
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def streamed(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client puts together from the events."""
    first, ping, *rest, change, stop = events
    assert [event["type"] for event in (first, ping, change, stop)] == [
        "message_start",
        "ping",
        "message_delta",
        "message_stop",
    ]
    message: dict[str, Any] = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    written = ""
    for event in rest:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(dict(event["content_block"]))
            written = ""
        block = message["content"][-1]
        assert event["index"] == len(message["content"]) - 1
        if event["type"] == "content_block_delta":
            match event["delta"]:
                case {"type": "text_delta", "text": text}:
                    block["text"] += text
                case {"type": "thinking_delta", "thinking": text}:
                    block["thinking"] += text
                case {"type": "input_json_delta", "partial_json": text}:
                    written += text
        elif event["type"] == "content_block_stop" and block["type"] == "tool_use":
            block["input"] = json.loads(written)
    return {**message, **change["delta"], "usage": {**message["usage"], **change["usage"]}}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "content": content, "id": ""}


async def both_of(cluster: Cluster, body: dict[str, Any]) -> dict[str, Any]:
    """Return the whole answer, and check that the streamed one is equal."""
    status, whole = await cluster.post(PATH, body)
    assert status == 200, whole
    assert without_ids(streamed(await events_of(cluster, body))) == without_ids(whole)
    return whole


async def test_the_whole_object() -> None:
    async with running_cluster(BYTES) as cluster:
        message = await both_of(cluster, SAY)
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "abc"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 6,
            "output_tokens": 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


async def test_cached_tokens_are_counted_apart() -> None:
    async with running_cluster(Script(tokens=[END], num_cached_tokens=2)) as cluster:
        message = await both_of(cluster, SAY)
    assert (message["content"], message["usage"]["input_tokens"]) == ([], 4)
    assert message["usage"]["cache_read_input_tokens"] == 2


@pytest.mark.parametrize(
    ("fields", "text", "reason", "sequence"),
    [
        ({}, "abc", "end_turn", None),
        ({"max_tokens": 2}, "ab", "max_tokens", None),
        ({"stop_sequences": ["zz", "c"]}, "ab", "stop_sequence", "c"),
        ({"max_tokens": 2**31 - 1}, "abc", "end_turn", None),
    ],
)
async def test_why_an_answer_ends(
    fields: dict[str, Any], text: str, reason: str, sequence: str | None
) -> None:
    async with running_cluster(BYTES) as cluster:
        message = await both_of(cluster, {**SAY, **fields})
    assert message["content"] == [{"type": "text", "text": text}]
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


async def test_an_answer_that_fills_the_model_has_its_own_stop_reason() -> None:
    async with running_cluster(Script(tokens=byte_ids(b"a") * 200)) as cluster:
        message = await both_of(cluster, {**SAY, "max_tokens": 1000})
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == (
        "model_context_window_exceeded",
        122,
    )


async def test_thinking_text_and_calls_are_blocks_in_their_order(tmp_path: Path) -> None:
    text = (
        '<think>Hm.</think>Look.<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    )
    async with writing_cluster(tmp_path, text, **PARSERS) as cluster:
        message = await both_of(cluster, {**TOOLS, "max_tokens": 500})
    thinking, said, weather, now = message["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert said == {"type": "text", "text": "Look."}
    assert weather.pop("id").startswith("toolu_") and now.pop("id").startswith("toolu_")
    assert weather == {"type": "tool_use", "name": "get_weather", "input": {"city": "Paris"}}
    assert now == {"type": "tool_use", "name": "now", "input": {}}
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"city": "Par', {"city": "Par"}),
        ('{"city": "a\nb"}', {"city": "a\nb"}),
        ('{"x": NaN}', {"x": "NaN"}),
        ('["A"]', {"arguments": ["A"]}),
        ('{"n": 123456789012345678901234567890}', {"n": 123456789012345678901234567890}),
        ("", {}),
    ],
)
async def test_the_input_of_a_call_is_always_an_object(arguments: str, value: Any, tmp_path: Path) -> None:
    """F10: the model's broken arguments are repaired as far as possible, and the client can send them back."""
    text = f'<tool_call>{{"name": "now", "arguments": {arguments}'
    async with writing_cluster(tmp_path, text, **PARSERS) as cluster:
        (block,) = (await both_of(cluster, {**TOOLS, "max_tokens": 500}))["content"]
    assert block["input"] == value


async def test_a_conversation_reaches_the_template(tmp_path: Path) -> None:
    template = (
        "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}"
        "{% if m.reasoning_content %}~{{ m.reasoning_content }}{% endif %}"
        "{% for c in m.tool_calls or [] %}!{{ c.id }}={{ c.function.name }}({{ c.function.arguments | tojson }})"
        "{% endfor %}{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}|{% endfor %}"
    )
    use = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}
    cached = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", **cached}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "T", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "A"},
                use,
                {**use, "id": "toolu_2"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "none"}],
                },
                {"type": "text", "text": "c"},
            ],
        },
    ]
    body = {**TOOLS, "system": [{"type": "text", "text": "S", **cached}], "messages": messages}
    async with writing_cluster(tmp_path, "ok", template=template) as cluster:
        status, answer = await cluster.post(PATH, body)
        assert status == 200, answer
        prompt = prompt_of(cluster)
        _, counted = await cluster.post(COUNT, {key: body[key] for key in body if key != "max_tokens"})
    assert counted == {"input_tokens": answer["usage"]["input_tokens"]}
    function = json.dumps(
        {"name": "get_weather", "description": "The weather.", "parameters": WEATHER["input_schema"]}
    )
    assert f'[{{"type": "function", "function": {function}}}]' in prompt
    paris = '{"city": "Paris"}'
    assert prompt.partition("]system")[2] == (
        f":S|user:a\nb|assistant:A~T!toolu_1=get_weather({paris})!toolu_2=get_weather({paris})|"
        "tool:sunny#toolu_1|tool:Error: none#toolu_2|user:c|"
    )


async def test_an_assistants_message_at_the_end_is_continued(tmp_path: Path) -> None:
    async with writing_cluster(tmp_path, "ok") as cluster:
        messages = [*SAY["messages"], {"role": "assistant", "content": "Once upon"}]
        status, answer = await cluster.post(PATH, {**SAY, "messages": messages})
        assert (status, answer["content"]) == (200, [{"type": "text", "text": "ok"}])
        assert prompt_of(cluster).endswith("assistant: Once upon")


@pytest.mark.parametrize(
    ("choice", "text", "names"),
    [
        ({"type": "any"}, '[{"name": "now", "parameters": {}}]', ["now"]),
        ({"type": "tool", "name": "get_weather"}, '{"city": "P"}', ["get_weather"]),
        ({"type": "none"}, "Ok.", []),
        ({"type": "auto", "disable_parallel_tool_use": True}, "Ok.", []),
    ],
)
async def test_a_tool_choice(choice: dict[str, Any], text: str, names: list[str], tmp_path: Path) -> None:
    async with writing_cluster(tmp_path, text, **PARSERS) as cluster:
        message = await both_of(cluster, {**TOOLS, "tool_choice": choice})
        has_grammar = cluster.workers["prefill-0"].received.prefills[0].task.sampling.HasField("grammar")
        shown = prompt_of(cluster).startswith("tools:")
    assert [block["name"] for block in message["content"] if block["type"] == "tool_use"] == names
    assert message["stop_reason"] == ("tool_use" if names else "end_turn")
    assert has_grammar == bool(names) and shown == (choice["type"] != "none")


async def test_thinking_effort_and_format_reach_the_model(tmp_path: Path) -> None:
    template = (
        "{{ enable_thinking | default('-') }} {{ reasoning_effort | default('-') }}|{{ messages[0].content }}"
    )
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "True -|"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "True -|"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "False high|"),
        ({"output_config": {"format": form}}, "- -|"),
        ({"output_format": form}, "- -|"),
    ]
    async with writing_cluster(tmp_path, "{}", template=template, strict_api=True) as cluster:
        for fields, prompt in cases:
            status, answer = await cluster.post(PATH, {**SAY, **fields})
            assert status == 200, answer
            assert prompt_of(cluster).startswith(prompt), fields
            sampling = cluster.workers["prefill-0"].received.prefills[-1].task.sampling
            assert sampling.HasField("grammar") == ("format" in str(fields))


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text"}]}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [7]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 7}]}]},
        "content[0].input",
    ),
    ({"messages": [{"role": "user", "content": "x" * 500}]}, "maximum context length"),
    ({"system": 7}, "system"),
    ({"system": [IMAGE]}, "system[0]"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"stop_sequences": 7}, "stop_sequences"),
    ({"tools": 7}, "tools"),
    ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "left out: web_search_20250305"),
    ({"tools": [SEARCH, NOW], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice.name"),
    ({"tools": [{"type": 7, "name": "f", "input_schema": {}}]}, "tools[0]"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
    ({"tools": [NOW], "tool_choice": {"type": "required"}}, "tool_choice.type"),
    ({"thinking": {"type": "hard"}}, "thinking.type"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"n": 2}, "n "),
]


def check_messages_error(answer: dict[str, Any], kind: str, words: str) -> None:
    assert set(answer) == {"type", "error", "request_id"} and answer["type"] == "error"
    assert set(answer["error"]) == {"type", "message"}
    assert answer["error"]["type"] == kind
    assert words in answer["error"]["message"]


async def test_bad_input_is_named_in_anthropics_shape() -> None:
    async with running_cluster(BYTES, (Role.AGGREGATED,)) as cluster:
        for fields, words in BAD:
            status, answer = await cluster.post(PATH, {**SAY, **fields})
            assert status == 400, (fields, answer)
            check_messages_error(answer, "invalid_request_error", words)
        assert cluster.workers["both-0"].received.decodes == []


async def test_errors_have_anthropics_shape_on_these_paths_alone() -> None:
    async with running_cluster(BYTES, (Role.AGGREGATED,), max_body_bytes=2000) as cluster:
        status, answer = await cluster.post(PATH, {**SAY, "model": "other"})
        check_messages_error(answer, "not_found_error", "other")
        status, answer = await cluster.post(PATH, {**SAY, "system": "x" * 3000})
        assert status == 413
        check_messages_error(answer, "request_too_large", "")
        status, answer = await cluster.get(PATH)
        assert status == 405
        check_messages_error(answer, "invalid_request_error", "GET")
        status, answer = await cluster.post(f"{PATH}/batches", {})
        assert status == 404
        check_messages_error(answer, "not_found_error", "batches")
        status, answer = await cluster.post("/v1/messages_of_others", {})
        assert status == 404 and "request_id" not in answer


async def test_an_error_within_a_stream_is_an_event() -> None:
    script = Script(tokens=byte_ids(b"abc"), fail_at=2, error=OverloadedError("too much"))
    async with running_cluster(script, (Role.AGGREGATED,), max_replays=0) as cluster:
        *events, last = await events_of(cluster, SAY)
    assert events[0]["type"] == "message_start"
    assert last["type"] == "error"
    check_messages_error(last, last["error"]["type"], "")


async def test_a_key_may_come_as_x_api_key() -> None:
    async with running_cluster(BYTES, (Role.AGGREGATED,), api_keys=KEY) as cluster:
        status, answer = await cluster.post(PATH, SAY)
        assert status == 401
        check_messages_error(answer, "authentication_error", "")
        for headers in (
            {"x-api-key": KEY, "anthropic-version": "2023-06-01"},
            {"Authorization": f"Bearer {KEY}"},
            {"x-api-key": KEY, "Authorization": "Basic dXNlcjpwYXNz"},
            {"x-api-key": KEY, "Authorization": "Bearer "},
        ):
            async with cluster.session.post(cluster.url(PATH), json=SAY, headers=headers) as response:
                assert response.status == 200
                assert response.headers["request-id"] == (await response.json())["id"]
        both = {"x-api-key": KEY, "Authorization": "Bearer sk-wrong"}
        assert (await cluster.post(PATH, SAY, headers=both))[0] == 401
        status, _ = await cluster.post(PATH, SAY, headers={"x-api-key": "sk-wrong"})
        assert status == 401
